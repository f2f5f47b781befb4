// What dp_vs_ddp says about its records.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "dp_vs_ddp_sides.h"

namespace bench {

void print_header(int layers, std::int64_t width);
/// Two lines: figures and phases, and the sentence on what limits it.
void print_row(const nlohmann::json& record);
/// One sentence on what keeps a mode from being n times as fast as one device.
std::string what_limits(Mode mode, int n, double speed_up, const Phases& phases, const Phases& one_device);
/// Adds records to a file that holds a list of them.
void append_records(const std::string& path, const nlohmann::json& records);

}  // namespace bench
