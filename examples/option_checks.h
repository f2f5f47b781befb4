// Checks of options, in plain words.
#pragma once
#include <limits>
#include <string>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <tandem/tensor/device.h>

/// A number from `low` to `high`.
inline CLI::Validator number_from(double low, double high = std::numeric_limits<double>::infinity()) {
  const bool limited = high < std::numeric_limits<double>::infinity();
  const std::string range = limited ? fmt::format("{} to {}", low, high) : fmt::format("{} or more", low);
  const auto check = [=](std::string& text) {
    double number = 0;
    if (!CLI::detail::lexical_cast(text, number)) return fmt::format("is {}; give a number", text);
    return number >= low && number <= high ? std::string() : fmt::format("is {}; give {}", text, range);
  };
  return {check, range};
}

/// One of 1, 2, 4, ... up to `high`.
inline CLI::Validator power_of_two_to(int high) {
  const auto check = [=](std::string& text) {
    if (const std::string wrong = number_from(1, high)(text); !wrong.empty()) return wrong;
    int number = 0;
    const bool whole = CLI::detail::lexical_cast(text, number);
    return whole && (number & (number - 1)) == 0 ? std::string() : fmt::format("is {}; give a power of two", text);
  };
  return {check, "a power of two"};
}

/// A device, which need not exist.
inline CLI::Validator device_name() {
  const auto check = [](std::string& text) {
    try {
      const tandem::Device device(text);
      return std::string();
    } catch (const tandem::Error&) {
      return fmt::format("is {}; give cpu, cuda, or one of several as cuda:1", text);
    }
  };
  return {check, "a device"};
}
