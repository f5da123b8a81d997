// The files of configs/hardware, as the build put them into the program.
#pragma once

#include <span>
#include <string_view>

namespace minillm::shard {

struct HardwareFile {
  std::string_view name;  ///< of the file, without folder and extension
  std::string_view text;
};

/// In alphabetical order.
std::span<const HardwareFile> hardware_files();

}  // namespace minillm::shard
