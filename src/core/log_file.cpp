#include "core/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "core/output_file.h"

namespace minillm {
namespace {

constexpr off_t kLongestRecord = 1 << 16;

}  // namespace

LogFile::LogFile(std::string path, int64_t expected_bytes) : path_(std::move(path)), lock_(path_) {
  const OutputTarget target = output_target(path_);
  regular_ = target.regular;
  if (!regular_) {
    file_ = open_in_place(path_, target);
    return;
  }
  const auto present = target.exists ? static_cast<int64_t>(std::filesystem::file_size(target.path)) : 0;
  require_room(path_, target, expected_bytes, present);
  file_ = Descriptor(open(target.path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (!file_) throw cannot_write(path_, errno);
}

void LogFile::append(std::string_view record) {
  if (regular_ && !mended_) mend_end();
  mended_ = true;
  const off_t end = regular_ ? lseek(file_.get(), 0, SEEK_END) : 0;
  const int error = write_all(file_.get(), std::string(record) + "\n");
  if (error == 0) return;
  if (regular_ && end >= 0) (void)!ftruncate(file_.get(), end);
  throw cannot_write(path_, error);
}

void LogFile::mend_end() {
  const off_t size = lseek(file_.get(), 0, SEEK_END);
  std::string end(static_cast<size_t>(std::clamp<off_t>(size, 0, kLongestRecord)), '\0');
  if (pread(file_.get(), end.data(), end.size(), size - std::ssize(end)) != std::ssize(end))
    throw cannot_write(path_, errno);
  if (end.empty() || end.ends_with('\n')) return;
  const size_t newline = end.rfind('\n');
  const std::string last = newline == std::string::npos ? end : end.substr(newline + 1);
  const bool torn = last.front() == '{' && last.back() != '}';
  const bool in_sight = newline != std::string::npos || size == std::ssize(end);
  const bool cut = torn && in_sight && ftruncate(file_.get(), size - std::ssize(last)) == 0;
  if (cut) return;
  if (const int error = write_all(file_.get(), "\n")) throw cannot_write(path_, error);
}

}  // namespace minillm
