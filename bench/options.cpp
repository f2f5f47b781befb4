#include "options.h"

#include <CLI/CLI.hpp>
#include <type_traits>

#include <tandem/examples/option_checks.h>

namespace bench {

struct Options::Parser {
  CLI::App app;
};

namespace {

// An empty text and a number that could not be given mean that there is no default.
template <class T>
bool has_default(const T& value, double low) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(value) >= low;
  else
    return !value.empty();
}

template <class T>
CLI::Option* add(CLI::App& app, const char* name, T& value, const char* help, double low = 0) {
  CLI::Option* option = app.add_option(name, value, help);
  if constexpr (!std::is_arithmetic_v<T> && !std::is_same_v<T, std::string>) option->delimiter(',');
  if (has_default(value, low)) option->capture_default_str();
  return option;
}

}  // namespace

Options::Options(const std::string& description) : parser_(new Parser{CLI::App(description)}) {}
Options::~Options() = default;

void Options::number(const char* name, Number value, const char* help, double low, double high) {
  std::visit(
      [&](auto* v) {
        CLI::Option* const option = add(parser_->app, name, *v, help, low);
        if (low > -std::numeric_limits<double>::infinity()) option->check(number_from(low, high));
      },
      value);
}

void Options::word(const char* name, Word value, const char* help, const std::vector<std::string>& choices) {
  std::visit(
      [&](auto* v) {
        CLI::Option* const option = add(parser_->app, name, *v, help);
        if (!choices.empty()) option->check(CLI::IsMember(choices));
      },
      value);
}

void Options::flag(const char* name, bool* value, const char* help) { parser_->app.add_flag(name, *value, help); }

std::optional<int> Options::parse(int argc, char** argv, const std::function<void()>& check) {
  try {
    parser_->app.parse(argc, argv);
    if (check) check();
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    return parser_->app.exit(e);
  }
}

bool Options::given(const char* name) const { return parser_->app.count(name) > 0; }

void Options::refuse(const char* option, const std::string& why) const { throw CLI::ValidationError(option, why); }

}  // namespace bench
