#include "core/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/error.h"

namespace minillm {
namespace {

/// Reads on until the end, an error (errno) or more than kMostTextBytes.
bool read_all(int file, std::string& text) {
  std::array<char, 1 << 16> part;
  while (static_cast<int64_t>(text.size()) <= kMostTextBytes) {
    const ssize_t bytes = ::read(file, part.data(), part.size());
    if (bytes == 0) return true;
    if (bytes > 0) text.append(part.data(), static_cast<size_t>(bytes));
    if (bytes < 0 && errno != EINTR) return false;
  }
  return true;
}

}  // namespace

std::string read_text_file(const std::string& path, const std::string& what) {
  const auto fail = [&](const std::string& cause) {
    throw InputError(path + ": cannot read " + what + ": " + cause);
  };
  // Not to wait for the writer of a FIFO, but then for what a writer writes.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(std::strerror(errno));
  (void)::fcntl(file, F_SETFL, 0);
  std::string text;
  const bool read = read_all(file, text);
  const int cause = errno;
  (void)::close(file);
  if (!read) fail(std::strerror(cause));
  if (static_cast<int64_t>(text.size()) > kMostTextBytes)
    fail("it has more than " + std::to_string(kMostTextBytes) + " bytes");
  return text;
}

void require_regular_file(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status) &&
      !std::filesystem::is_regular_file(status))
    throw InputError(path + ": not a regular file");
}

}  // namespace minillm
