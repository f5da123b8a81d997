// How files of text are read: configurations, descriptions of hardware, choices of algorithms.
#pragma once

#include <cstdint>
#include <string>

namespace minillm {

inline constexpr int64_t kMostTextBytes = int64_t{64} << 20;  ///< what has more is no such file

/// The whole of a file. Pipes and FIFOs are read to their end; a FIFO that nobody writes to is empty. Throws
/// InputError "PATH: cannot read WHAT: CAUSE", also for more than kMostTextBytes, as /dev/zero has.
std::string read_text_file(const std::string& path, const std::string& what);

/// Throws InputError "PATH: not a regular file" for what exists and is none. For what is read by position;
/// opening a FIFO would wait for its writer.
void require_regular_file(const std::string& path);

}  // namespace minillm
