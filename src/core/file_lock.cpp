#include "core/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/output_file.h"

namespace minillm {
namespace {

std::string this_process() {
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  return "process " + std::to_string(getpid()) + " on " + host.data();
}

std::string text_of(int file) {
  std::array<char, 512> text{};
  const ssize_t bytes = pread(file, text.data(), text.size(), 0);
  return bytes > 0 ? std::string(text.data(), static_cast<size_t>(bytes)) : "which has not said its name yet";
}

/// Whether `path` still names the open file: its holder may have removed it in between.
bool is_at(const std::string& path, int file) {
  struct stat opened {
  }, named{};
  return fstat(file, &opened) == 0 && stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

}  // namespace

FileLock::FileLock(const std::string& path) {
  const OutputTarget target = output_target(path);
  if (!target.regular) return;
  const std::filesystem::path file = target.path;
  lock_path_ = file.parent_path() / (std::string(".") += file.filename().string() + ".lock");
  do {
    file_ = Descriptor(open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_) throw cannot_write(lock_path_, errno);
    int result = 0;
    while ((result = flock(file_.get(), LOCK_EX | LOCK_NB)) != 0 && errno == EINTR) {
    }
    if (result != 0 && errno == EWOULDBLOCK)
      throw InputError(path + ": another run is writing it: " + text_of(file_.get()) +
                       ". Wait until that has ended, or give this one another folder.");
    if (result != 0) {
      weakness_ = path + ": its file system has no locks (" + std::strerror(errno) +
                  "): no other run may use this folder at the same time";
      return;
    }
  } while (!is_at(lock_path_, file_.get()));
  (void)!ftruncate(file_.get(), 0);
  (void)write_all(file_.get(), this_process());  // for people: without it the lock is as good
}

FileLock::~FileLock() {
  if (file_ && weakness_.empty()) ::unlink(lock_path_.c_str());  // before it is open to others
}

}  // namespace minillm
