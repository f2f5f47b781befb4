// What modules and losses share.
#pragma once
#include <string>
#include <typeinfo>

namespace tandem::nn {

/// The name of a type without namespaces and "Impl".
std::string kind_of(const std::type_info& type);

}  // namespace tandem::nn
