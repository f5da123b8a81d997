// How files are written: whole or not at all.
//
// A regular file is written beside its place under a temporary name that nobody else has, flushed to the
// disk, and renamed; until then, and after any error, what was there is unchanged. The new file keeps the old
// one's owner (where allowed) and mode. Symbolic links are followed: what they lead to is replaced and they
// stay. What cannot be replaced (devices, FIFOs, /dev/stdout, /dev/fd/N) is written to as the bytes come.
//
// Whoever writes with this has to ignore SIGXFSZ, or a limit of file sizes ends the process before it can
// tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/descriptor.h"
#include "core/error.h"

namespace minillm {

/// "PATH: cannot be written: CAUSE. What to do."
InputError cannot_write(const std::string& path, int error_number);

/// Creates the folder and those above it. Throws InputError naming it and the cause.
void make_folder(const std::string& path);

/// What a path for output leads to, its symbolic links followed.
struct OutputTarget {
  std::string path;
  bool exists = false;
  bool regular = true;  ///< a regular file, or one could be made there
  int descriptor = -1;  ///< of this process, for /dev/stdout and the like
};
/// Throws InputError for a folder, a file that this user may not write, and links in a circle.
OutputTarget output_target(const std::string& path);
/// Opens what is not regular; waits for the reader of a FIFO. Throws InputError naming `path`.
Descriptor open_in_place(const std::string& path, const OutputTarget& target);
/// Throws InputError when `bytes` more than the `present` ones are more than a file may have, or than are
/// free on the disk.
void require_room(const std::string& path, const OutputTarget& target, int64_t bytes, int64_t present = 0);

class OutputFile {
 public:
  /// Opens the temporary file; a FIFO is waited for. Throws InputError naming `path` and the cause: as
  /// output_target() and require_room(), or a folder where no file can be made.
  explicit OutputFile(std::string path, int64_t expected_bytes = 0);
  /// What was not finished is removed.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Both throw InputError naming the path and the cause.
  void write(std::string_view text);
  void write(std::span<const std::byte> bytes);
  /// Puts the file in its place, where it survives a power cut. Throws InputError likewise.
  void finish();

 private:
  void open_temporary();

  std::string path_;  // for messages
  OutputTarget target_;
  std::string temporary_;  // empty: none
  Descriptor file_;
};

/// Throws the InputError that writing a file of `bytes` at `path` would, as far as that can be known before
/// (a quota cannot): to be called before long work.
void require_writable(const std::string& path, int64_t bytes);

/// Removes the temporary files of writers of `path` that were killed. Nobody may be writing it: see FileLock.
void remove_leftovers(const std::string& path);

}  // namespace minillm
