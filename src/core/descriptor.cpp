#include "core/descriptor.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace minillm {

int Descriptor::close() {
  const int number = std::exchange(number_, -1);
  // Linux has closed the file also where it was interrupted.
  return number < 0 || ::close(number) == 0 || errno == EINTR ? 0 : errno;
}

int write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd ready{.fd = descriptor, .events = POLLOUT, .revents = 0};
      (void)::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace minillm
