#include "app/standard_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"

namespace minillm::app {
namespace {

constexpr size_t kBufferBytes = 1 << 14;

/// A standard file that the caller closed must not give its number to the next file that is opened, into
/// which everything printed would go. What takes its place can only be used the other way round.
void occupy_standard_files() {
  for (const int file : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(file, F_GETFD) < 0 && errno == EBADF)
      (void)open("/dev/null", file == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // the lowest number that is free
}

}  // namespace

StandardOutput::StandardOutput() : before_(std::cout.rdbuf(this)) {
  (void)std::signal(SIGPIPE, SIG_IGN);
  (void)std::signal(SIGXFSZ, SIG_IGN);
  occupy_standard_files();
}

StandardOutput::~StandardOutput() {
  std::cout.flush();
  std::cout.rdbuf(before_);
}

void StandardOutput::check() const {
  std::cout.flush();
  if (error_ != 0)
    throw InputError(std::string("standard output cannot be written: ") + std::strerror(error_) +
                     ". Give the program a reader that stays until it ends, or a file with enough room.");
}

int StandardOutput::overflow(int character) {
  if (character == traits_type::eof()) return 0;
  const char one = traits_type::to_char_type(character);
  return xsputn(&one, 1) == 1 ? 0 : traits_type::eof();
}

std::streamsize StandardOutput::xsputn(const char* text, std::streamsize count) {
  unwritten_.append(text, static_cast<size_t>(count));
  return unwritten_.size() < kBufferBytes || sync() == 0 ? count : 0;
}

int StandardOutput::sync() {
  const std::string text = std::exchange(unwritten_, {});
  if (error_ == 0) error_ = write_all(STDOUT_FILENO, text);
  return error_ == 0 ? 0 : -1;
}

}  // namespace minillm::app
