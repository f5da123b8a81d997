// Output that nobody reads, that nobody can read any more, and that does not fit.
#include "train/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <sstream>

#include "core/error.h"
#include "tests/unit/errors.h"

namespace minillm::train {
namespace {

using test::expect_error;

class Pipe {
 public:
  Pipe() { EXPECT_EQ(pipe(ends_.data()), 0); }
  ~Pipe() {
    close_reader();
    close_writer();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int writer() const { return ends_[1]; }
  void close_reader() { close_end(ends_[0]); }
  void close_writer() { close_end(ends_[1]); }
  /// Waits for that many bytes.
  std::string read(size_t bytes) {
    std::string text(bytes, '\0');
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = ::read(ends_[0], text.data() + done, bytes - done);
      if (got <= 0) return text.substr(0, done);
      done += static_cast<size_t>(got);
    }
    return text;
  }

 private:
  static void close_end(int& end) {
    if (end >= 0) (void)close(end);
    end = -1;
  }
  std::array<int, 2> ends_{-1, -1};
};

/// More than a pipe holds.
std::string many_lines() {
  std::string text;
  for (int i = 0; text.size() < (size_t{1} << 20); ++i) text += "Step " + std::to_string(i) + "\n";
  return text;
}

void print_lines(std::ostream& stream, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) stream << line << std::endl;
}

TEST(Console, WritesWhatIsFlushed) {
  Pipe pipe;
  std::ostringstream stream;
  stream << "before, ";
  {
    Console console(stream, pipe.writer(), {});
    stream << "a " << 'l' << "ine" << std::endl;
    EXPECT_EQ(pipe.read(7), "a line\n");
    stream << "not flushed";
  }
  EXPECT_EQ(pipe.read(11), "not flushed") << "the end writes everything";
  stream << "after";
  EXPECT_EQ(stream.str(), "before, after");
}

TEST(Console, GoesOnWhileNobodyReads) {
  Pipe pipe;
  std::ostringstream stream;
  Console console(stream, pipe.writer(), {});
  const std::string text = many_lines();
  print_lines(stream, text);  // one thread: a write that blocked would never return
  EXPECT_TRUE(stream.good());
  console.check();
  EXPECT_EQ(pipe.read(text.size()), text) << "nothing is lost, and all is in order";
  console.finish();
  stream << "and then" << std::endl;
  EXPECT_EQ(pipe.read(9), "and then\n");
}

TEST(Console, EndsWithPatienceWhileNobodyReads) {
  Pipe pipe;
  std::ostringstream stream;
  const std::string text = many_lines();
  {
    const Console console(stream, pipe.writer(), std::chrono::seconds(0));
    print_lines(stream, text);
  }
  EXPECT_EQ(pipe.read(text.size()), text) << "while the process lives, the thread goes on";
}

TEST(Console, AReaderThatIsGoneIsAnError) {
  Pipe pipe;
  pipe.close_reader();
  std::ostringstream stream;
  Console console(stream, pipe.writer(), {});
  stream << "a line" << std::endl;
  expect_error<InputError>([&] { console.finish(); }, {"standard output", "Broken pipe"});
  expect_error<InputError>([&] { console.check(); }, {"standard output", "Broken pipe"});
  stream << std::flush;
  EXPECT_TRUE(stream.bad());
}

TEST(Console, AFullDiskIsAnError) {
  const int full = open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  std::ostringstream stream;
  {
    Console console(stream, full, {});
    stream << "a line" << std::endl;
    expect_error<InputError>([&] { console.finish(); }, {"standard output", "No space left on device"});
  }
  (void)close(full);
}

}  // namespace
}  // namespace minillm::train
