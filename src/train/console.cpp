#include "train/console.h"

#include <pthread.h>

#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"

namespace minillm::train {
namespace {

/// What a flush waits at most: far longer than a write that does not block.
constexpr std::chrono::milliseconds kMoment{100};

}  // namespace

struct Console::Writer {
  explicit Writer(int to) : descriptor(to) {}

  const int descriptor;
  std::mutex mutex;  ///< of all that follows
  std::condition_variable changed;
  std::string pending;
  bool writing = false;
  bool stop = false;
  int error = 0;
  std::thread thread;

  bool idle() const { return pending.empty() && !writing; }

  void run() {
    sigset_t all;  // a broken pipe is an error of write(), and signals of the process are the main thread's
    sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stop || !pending.empty(); });
      if (pending.empty()) return;
      const std::string text = std::exchange(pending, {});
      writing = true;
      lock.unlock();
      const int failed = error == 0 ? write_all(descriptor, text) : 0;
      lock.lock();
      writing = false;
      if (error == 0) error = failed;
      changed.notify_all();
    }
  }
};

Console::Console(std::ostream& stream, int descriptor, std::optional<std::chrono::seconds> patience)
    : stream_(stream),
      before_((stream.flush(), stream.rdbuf(this))),
      patience_(patience),
      writer_(std::make_shared<Writer>(descriptor)) {
  writer_->thread = std::thread([writer = writer_] { writer->run(); });
}

Console::~Console() {
  hand_over();
  stream_.rdbuf(before_);
  std::unique_lock lock(writer_->mutex);
  const auto idle = [this] { return writer_->idle(); };
  if (patience_)
    writer_->changed.wait_for(lock, *patience_, idle);
  else
    writer_->changed.wait(lock, idle);
  const bool done = idle();
  writer_->stop = true;
  writer_->changed.notify_all();
  lock.unlock();
  done ? writer_->thread.join() : writer_->thread.detach();
}

void Console::check() {
  const std::lock_guard lock(writer_->mutex);
  if (writer_->error != 0)
    throw InputError(std::string("standard output cannot be written: ") + std::strerror(writer_->error) +
                     ". Give the run a reader that stays until it ends, or a file with enough room.");
}

void Console::finish() {
  hand_over();
  {
    std::unique_lock lock(writer_->mutex);
    writer_->changed.wait(lock, [this] { return writer_->idle(); });
  }
  check();
}

int Console::overflow(int character) {
  if (character != traits_type::eof()) unflushed_ += traits_type::to_char_type(character);
  return 0;
}

std::streamsize Console::xsputn(const char* text, std::streamsize count) {
  unflushed_.append(text, static_cast<size_t>(count));
  return count;
}

void Console::hand_over() {
  const std::lock_guard lock(writer_->mutex);
  writer_->pending += std::exchange(unflushed_, {});
  writer_->changed.notify_all();
}

int Console::sync() {
  hand_over();
  std::unique_lock lock(writer_->mutex);
  const auto idle = [this] { return writer_->idle(); };
  behind_ = behind_ ? !idle() : !writer_->changed.wait_for(lock, kMoment, idle);
  return writer_->error == 0 ? 0 : -1;
}

}  // namespace minillm::train
