// A file that appears whole or not at all.
#pragma once

#include <fstream>
#include <string>

namespace minillm::app {

class OutputFile {
 public:
  /// Opens a file beside `path`, so that an unwritable folder is told at once. Throws InputError naming it.
  explicit OutputFile(std::string path);
  /// What was not finished is removed; `path` is what it was before.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  std::ostream& stream() { return file_; }
  /// Puts it in the place of `path`. Throws InputError when something could not be written.
  void finish();

 private:
  std::string path_, unfinished_;
  std::ofstream file_;
};

}  // namespace minillm::app
