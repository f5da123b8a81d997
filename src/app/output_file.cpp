#include "app/output_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace minillm::app {

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), unfinished_(path_ + ".unfinished"), file_(unfinished_, std::ios::binary) {
  if (!file_) throw InputError(path_ + ": cannot be written: " + std::strerror(errno));
}

OutputFile::~OutputFile() {
  if (!file_.is_open()) return;
  file_.close();
  std::error_code ignored;
  std::filesystem::remove(unfinished_, ignored);
}

void OutputFile::finish() {
  if (!file_.flush()) throw InputError(path_ + ": cannot be written: " + std::strerror(errno));
  std::error_code error;
  std::filesystem::rename(unfinished_, path_, error);
  if (error) throw InputError(path_ + ": cannot be written: " + error.message());
  file_.close();
}

}  // namespace minillm::app
