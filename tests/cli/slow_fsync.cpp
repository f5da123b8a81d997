// Preloaded into a program: its first fsync() takes SLOW_FSYNC_S seconds, as on a disk that others write to.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

extern "C" int fsync(int descriptor) {
  static std::atomic<bool> slow{true};
  const char* const seconds = std::getenv("SLOW_FSYNC_S");
  if (slow.exchange(false) && seconds != nullptr) sleep(static_cast<unsigned>(std::atoi(seconds)));
  return static_cast<int>(syscall(SYS_fsync, descriptor));
}
