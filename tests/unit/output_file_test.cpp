// What is left of a file, and what is said, when writing it goes well or wrong.
#include "core/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <thread>

#include "core/file_lock.h"
#include "core/log_file.h"
#include "errors.h"
#include "temporary_folder.h"

namespace minillm {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

void write_file(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.write(text);
  file.finish();
}

/// How many files a folder has: no temporary is left where it is as expected.
int64_t entries(const TemporaryFolder& folder) {
  return std::distance(fs::directory_iterator(folder.path("")), {});
}

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777;
}

/// A device like /dev/null or /dev/full that the program, where it may do all, can spoil only for this test;
/// empty where none can be made.
std::string device(const TemporaryFolder& folder, const char* name, unsigned minor) {
  if (geteuid() != 0) return std::string("/dev/") + name;
  const std::string path = folder.path(name);
  if (mknod(path.c_str(), S_IFCHR | 0666, makedev(1, minor)) != 0) return "";
  return Descriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC)) ? path : "";
}

/// Files of this process may have this many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit small{bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &old_); }

 private:
  rlimit old_{};
};

TEST(OutputFile, AppearsWhenItIsFinished) {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "older");
  {
    OutputFile file(path);
    file.write("never");
    EXPECT_EQ(folder.read("file"), "older");
    EXPECT_EQ(entries(folder), 2);
  }
  EXPECT_EQ(folder.read("file"), "older");
  EXPECT_EQ(entries(folder), 1);
  write_file(path, "new");
  EXPECT_EQ(folder.read("file"), "new");
  EXPECT_EQ(entries(folder), 1);
}

TEST(OutputFile, TwoWritersShareNothing) {
  const TemporaryFolder folder;
  OutputFile first(folder.path("file")), second(folder.path("file"));
  first.write("first");
  second.write("second");
  first.finish();
  EXPECT_EQ(folder.read("file"), "first");
  second.finish();
  EXPECT_EQ(folder.read("file"), "second");
}

TEST(OutputFile, KeepsTheModeOfTheOldFileAndHonoursTheUmask) {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "older");
  fs::permissions(path, fs::perms(0604));
  const mode_t old = umask(027);
  write_file(path, "new");
  write_file(folder.path("fresh"), "new");
  umask(old);
  EXPECT_EQ(mode_of(path), 0604u);
  EXPECT_EQ(mode_of(folder.path("fresh")), 0640u);
}

TEST(OutputFile, FollowsLinks) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path("elsewhere"));
  folder.write("elsewhere/file", "older");
  fs::create_symlink("elsewhere/file", folder.path("one"));
  fs::create_symlink(folder.path("one"), folder.path("two"));
  fs::create_symlink("elsewhere/fresh", folder.path("dangling"));
  write_file(folder.path("two"), "new");
  write_file(folder.path("dangling"), "fresh");
  EXPECT_EQ(folder.read("elsewhere/file"), "new");
  EXPECT_EQ(folder.read("elsewhere/fresh"), "fresh");
  for (const char* link : {"one", "two", "dangling"}) EXPECT_TRUE(fs::is_symlink(folder.path(link))) << link;
  fs::create_symlink("circle", folder.path("circle"));
  expect_error<InputError>([&] { write_file(folder.path("circle"), "text"); },
                           {folder.path("circle"), "cannot be written", "symbolic links"});
}

TEST(OutputFile, WritesToWhatCannotBeReplaced) {
  const TemporaryFolder folder;
  if (const std::string null = device(folder, "null", 3); !null.empty()) {
    write_file(null, "text");
    require_writable(null, int64_t{1} << 61);
    EXPECT_TRUE(fs::is_character_file(null));
  }
  const std::string fifo = folder.path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] { received = folder.read("fifo"); });
  write_file(fifo, "through the pipe");
  reader.join();
  EXPECT_EQ(received, "through the pipe");
  EXPECT_TRUE(fs::is_fifo(fifo));
  // An open file is written where it stands.
  const Descriptor open_file(::open(folder.path("open").c_str(), O_WRONLY | O_CREAT, 0600));
  ASSERT_EQ(write_all(open_file.get(), "head "), 0);
  write_file("/dev/fd/" + std::to_string(open_file.get()), "rest");
  EXPECT_EQ(folder.read("open"), "head rest");
  if (const std::string full = device(folder, "full", 7); !full.empty())
    expect_error<InputError>([&] { write_file(full, "text"); }, {full + ": cannot be written: No space"});
}

TEST(OutputFile, ErrorsNameThePathAndTheCause) {
  const TemporaryFolder folder;
  expect_error<InputError>([&] { write_file(folder.path("no/file"), ""); },
                           {folder.path("no/file"), "No such file"});
  fs::create_directory(folder.path("folder"));
  expect_error<InputError>([&] { write_file(folder.path("folder"), ""); },
                           {folder.path("folder"), "directory"});
  expect_error<InputError>([&] { make_folder(folder.write("file", "") + "/below"); },
                           {folder.path("file/below"), "cannot be created as a folder"});
  EXPECT_EQ(entries(folder), 2);
}

TEST(OutputFile, ALimitOfFileSizesIsAnErrorAndKnownBefore) {
  const TemporaryFolder folder;
  const std::string path = folder.write("file", "older");
  const FileSizeLimit limit(1000);
  expect_error<InputError>([&] { require_writable(path, 1001); }, {path, "1001", "1000", "ulimit -f"});
  require_writable(path, 1000);
  expect_error<InputError>([&] { write_file(path, std::string(1001, 'a')); },
                           {path, "cannot be written: File too large", "ulimit -f"});
  EXPECT_EQ(folder.read("file"), "older");
  EXPECT_EQ(entries(folder), 1);
}

TEST(OutputFile, AFullDiskIsKnownBefore) {
  const TemporaryFolder folder;
  expect_error<InputError>([&] { require_writable(folder.path("file"), int64_t{1} << 61); },
                           {folder.path("file"), std::to_string(int64_t{1} << 61), "are free on its disk"});
  EXPECT_EQ(entries(folder), 0);
}

TEST(OutputFile, LeftoversOfKilledWritersAreRemovedAndNothingElse) {
  const TemporaryFolder folder;
  folder.write("file.tmp-0123456789abcdef", "");
  for (const char* kept : {"file", "file.tmp-0123456789abcdeg", "file.tmp-0", "files.tmp-0123456789abcdef"})
    folder.write(kept, "");
  remove_leftovers(folder.path("file"));
  EXPECT_FALSE(fs::exists(folder.path("file.tmp-0123456789abcdef")));
  EXPECT_EQ(entries(folder), 4);
}

TEST(FileLock, NamesItsHolderAndEndsWithIt) {
  const TemporaryFolder folder;
  fs::create_symlink("file", folder.path("link"));
  auto holder = std::make_unique<FileLock>(folder.path("file"));
  EXPECT_EQ(holder->weakness(), "");
  for (const char* name : {"file", "link"})
    expect_error<InputError>([&] { FileLock second(folder.path(name)); },
                             {folder.path(name), "another run", "process " + std::to_string(getpid())});
  const FileLock other(folder.path("other"));
  holder.reset();
  EXPECT_FALSE(fs::exists(folder.path(".file.lock")));
  folder.write(".file.lock", "process 1 on a machine that was switched off");
  const FileLock after(folder.path("file"));
  EXPECT_EQ(folder.read(".file.lock").find("process " + std::to_string(getpid()) + " on "), 0u);
}

TEST(FileLock, DevicesHaveNone) {
  const FileLock one("/dev/null"), two("/dev/null");
}

TEST(LogFile, KeepsWhatIsThere) {
  const TemporaryFolder folder;
  const std::string path = folder.write("log", "{\"a\":1}\n");
  { const LogFile log(path, 0); }
  EXPECT_EQ(folder.read("log"), "{\"a\":1}\n");
  {
    LogFile log(path, 0);
    log.append("{\"b\":2}");
    EXPECT_EQ(folder.read("log"), "{\"a\":1}\n{\"b\":2}\n");
    log.append("{}");
    expect_error<InputError>([&] { LogFile second(path, 0); }, {path, "another run"});
  }
  EXPECT_EQ(folder.read("log"), "{\"a\":1}\n{\"b\":2}\n{}\n");
  EXPECT_EQ(entries(folder), 1);
}

TEST(LogFile, ARecordThatAKilledRunLeftDoesNotHurtTheNext) {
  struct Case {
    std::string before, after;
  };
  for (const auto& [before, after] :
       {Case{"{\"a\":1}\n{\"b", "{\"a\":1}\n{}\n"}, Case{"{", "{}\n"}, Case{"{\"a\":1}", "{\"a\":1}\n{}\n"},
        Case{"no record", "no record\n{}\n"}, Case{"", "{}\n"}, Case{"\n", "\n{}\n"}}) {
    const TemporaryFolder folder;
    LogFile log(folder.write("log", before), 0);
    EXPECT_EQ(folder.read("log"), before);
    log.append("{}");
    EXPECT_EQ(folder.read("log"), after) << before;
  }
}

TEST(LogFile, ARecordThatDoesNotFitLeavesNoPartOfItself) {
  const TemporaryFolder folder;
  LogFile log(folder.path("log"), 0);
  log.append("{}");
  const FileSizeLimit limit(6);
  expect_error<InputError>([&] { log.append("{\"a\":1}"); }, {folder.path("log"), "File too large"});
  EXPECT_EQ(folder.read("log"), "{}\n");
  expect_error<InputError>([&] { LogFile other(folder.write("other", "12345"), 2); },
                           {folder.path("other"), "7", "6"});
}

}  // namespace
}  // namespace minillm
