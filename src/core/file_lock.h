// The right to be the one that writes a file.
#pragma once

#include <string>

#include "core/descriptor.h"

namespace minillm {

/// An flock() of `.NAME.lock` beside the file that `path` leads to, which says who holds it. It ends with the
/// process, however that ends; what a killed one leaves of it is taken over. On a network file system it
/// holds between machines where the file system's locks do. Devices and FIFOs have no lock: anybody may write
/// them.
class FileLock {
 public:
  /// Throws InputError naming the process that holds the lock, or the lock file when that cannot be made.
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  /// Why the lock keeps nobody out; empty when it does.
  const std::string& weakness() const { return weakness_; }

 private:
  std::string lock_path_, weakness_;
  Descriptor file_;
};

}  // namespace minillm
