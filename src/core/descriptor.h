// A file descriptor that closes itself.
#pragma once

#include <string_view>
#include <utility>

namespace minillm {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { (void)close(); }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  /// 0 or errno: a file system may tell only now what could not be written.
  int close();

 private:
  int number_ = -1;
};

/// Writes all of `bytes`, however many calls that takes and whoever interrupts them, also where the
/// descriptor was made non-blocking. 0 or errno.
int write_all(int descriptor, std::string_view bytes);

}  // namespace minillm
