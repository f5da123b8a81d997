// Preloaded into a program: FAIL_CALL=write|fsync|close|rename|flock fails with errno FAIL_ERRNO on files
// whose path has FAIL_PATH in it; "short" is a write() that takes at most 1000 bytes, every other time
// interrupted.
#include <dlfcn.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

bool asked_for(const char* call, const char* path) {
  const char* const wanted = std::getenv("FAIL_CALL");
  const char* const part = std::getenv("FAIL_PATH");
  return wanted != nullptr && part != nullptr && std::strcmp(wanted, call) == 0 &&
         std::strstr(path, part) != nullptr;
}

bool asked_for(const char* call, int file) {
  char path[4096] = {};
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path - 1);
  return length > 0 && asked_for(call, path);
}

int fail() {
  errno = std::atoi(std::getenv("FAIL_ERRNO"));
  return -1;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t write(int file, const void* bytes, size_t count) {
  static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
  if (asked_for("write", file)) return fail();
  if (asked_for("short", file)) {
    static bool interrupted = false;
    interrupted = !interrupted;
    if (interrupted) return errno = EINTR, -1;
    return real(file, bytes, count < 1000 ? count : 1000);
  }
  return real(file, bytes, count);
}

int fsync(int file) {
  static auto* const real = next<int(int)>("fsync");
  return asked_for("fsync", file) ? fail() : real(file);
}

int close(int file) {
  static auto* const real = next<int(int)>("close");
  const bool failing = asked_for("close", file);
  const int result = real(file);
  return failing ? fail() : result;
}

int rename(const char* from, const char* to) noexcept {
  static auto* const real = next<int(const char*, const char*)>("rename");
  return asked_for("rename", from) ? fail() : real(from, to);
}

int flock(int file, int operation) noexcept {
  static auto* const real = next<int(int, int)>("flock");
  return asked_for("flock", file) ? fail() : real(file, operation);
}
}
