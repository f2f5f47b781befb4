// Devices that work with a group that broke while they waited for it: whoever waits for one learns it.
#pragma once
#include <exception>

#include <tandem/tensor/device.h>

namespace tandem::parallel {

/// What a stream of the device waits for will not come, or has come wrong: the next wait of the host for the device
/// throws this, unless it is forgotten before.
void report_broken(Device device, const std::exception_ptr& error);
/// It was thrown elsewhere.
void forget_broken(Device device, const std::exception_ptr& error);

}  // namespace tandem::parallel
