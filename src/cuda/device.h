// What the current device is, as far as it decides how it is used.
#pragma once

namespace minillm::cuda {

/// Ten times the major number plus the minor one: 90 for 9.0. Throws DeviceError, as does the other.
int compute_capability();

/// Whether its memory can be mapped to addresses of choice and shared with other devices by handles, of which
/// NCCL makes symmetric windows: not on every virtual machine, nor with every driver.
bool has_virtual_memory_management();

}  // namespace minillm::cuda
