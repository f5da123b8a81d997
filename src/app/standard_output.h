// Standard output whose errors are known.
#pragma once

#include <streambuf>
#include <string>

namespace minillm::app {

/// Takes std::cout's output for as long as it lives, and remembers the first error of writing it, which the
/// stream itself does not tell. To be made before any file is opened.
class StandardOutput : private std::streambuf {
 public:
  /// Makes a broken pipe and a file at its limit errors of write() instead of the end of the process.
  StandardOutput();
  ~StandardOutput() override;
  StandardOutput(const StandardOutput&) = delete;
  StandardOutput& operator=(const StandardOutput&) = delete;

  /// Flushes. Throws InputError with the cause when something that was printed could not be written.
  void check() const;

 private:
  int overflow(int character) override;
  std::streamsize xsputn(const char* text, std::streamsize count) override;
  int sync() override;

  std::streambuf* const before_;
  std::string unwritten_;
  int error_ = 0;
};

}  // namespace minillm::app
