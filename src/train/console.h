// Standard output that never holds up a run.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <ostream>
#include <streambuf>
#include <string>

namespace minillm::train {

/// Takes a stream's output for as long as it lives, and writes it to a file descriptor on a thread of its
/// own: nobody has to read what a run says (a full pipe, a terminal that was stopped by Ctrl-S) for its steps
/// to go on. What is not yet written is kept in memory, a line per step.
///
/// A flush of the stream waits until everything is written, but only for a moment, and not again before the
/// reader has caught up. Where the descriptor cannot be written (no reader any more, a full disk) the stream
/// becomes bad; SIGPIPE is not raised. The stream is used by one thread.
class Console : private std::streambuf {
 public:
  /// `patience`: how long the destructor waits for the reader at most; none: without end.
  Console(std::ostream& stream, int descriptor, std::optional<std::chrono::seconds> patience);
  ~Console() override;
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// Throws InputError with the cause when something could not be written.
  void check();
  /// Waits until everything is written, however long the reader takes, and checks.
  void finish();

 private:
  struct Writer;

  int overflow(int character) override;
  std::streamsize xsputn(const char* text, std::streamsize count) override;
  int sync() override;
  void hand_over();

  std::ostream& stream_;
  std::streambuf* const before_;
  const std::optional<std::chrono::seconds> patience_;
  std::string unflushed_;
  bool behind_ = false;             ///< the reader, at the last flush
  std::shared_ptr<Writer> writer_;  ///< shared with its thread, which may outlive this object in a write()
};

}  // namespace minillm::train
