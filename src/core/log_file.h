// A file of JSON objects, one a line, to which runs append.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/descriptor.h"
#include "core/file_lock.h"

namespace minillm {

/// What earlier runs wrote stays. A record is one write(), so that it outlives the process, and is whole or
/// not there; the beginning of one that a killed run or a full disk left at the end of the file is removed
/// before the first record is appended. One writer at a time: see FileLock. Links, devices and FIFOs are as
/// in core/output_file.h.
class LogFile {
 public:
  /// Opens or creates the file, whose folder exists, and changes nothing in it. Throws InputError naming it
  /// and the cause, or the run that is writing it; also where there is no room for `expected_bytes` more.
  LogFile(std::string path, int64_t expected_bytes);

  /// Appends `record`, a JSON object without newline. Throws InputError.
  void append(std::string_view record);

  const FileLock& lock() const { return lock_; }

 private:
  void mend_end();

  std::string path_;
  FileLock lock_;
  Descriptor file_;
  bool regular_ = true;
  bool mended_ = false;
};

}  // namespace minillm
