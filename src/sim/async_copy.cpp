#include "sim/async_copy.h"

#include <cstdio>
#include <string>

#include "sim/sanitizer.h"
#include "sim/simt_errors.h"

namespace sim {
namespace {

std::string address(const void* pointer) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", pointer);
  return text;
}

bool at_issue(const Order& order, uint64_t number) {
  if (order.kind != Order::Kind::kShuffle) return order.kind == Order::Kind::kReverse;
  return ((order.seed + number) * 0x9E3779B97F4A7C15u >> 63) != 0;
}

}  // namespace

void AsyncCopies::announce(const Copy& copy) {
  if (copy.exists) announce_read(copy.from, copy.bytes);
  announce_write(copy.to, copy.bytes);
}

/// Volatile words: not announced twice, and no call of memcpy, which would be.
SIM_INVISIBLE void AsyncCopies::move(const Copy& copy) {
  auto* to = static_cast<volatile uint32_t*>(copy.to);
  const auto* from = static_cast<const volatile uint32_t*>(copy.from);
  for (size_t i = 0; i < copy.bytes / 4; ++i) to[i] = copy.exists ? from[i] : 0;
}

void AsyncCopies::issue(void* to, const void* from, size_t bytes, bool exists, const Order& order) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
      (exists && reinterpret_cast<uintptr_t>(from) % bytes != 0))
    fail("cp.async: copies of " + std::to_string(bytes) + " bytes from " + address(from) + " to " +
         address(to) + ": both must be aligned to the size");
  const Copy copy{to, from, bytes, exists, at_issue(order, issued_++), group_};
  announce(copy);
  if (copy.moved) move(copy);
  under_way_.push_back(copy);
}

void AsyncCopies::commit() {
  if (group_ - joined_ == kGroups)
    fail("cp.async.commit_group: " + std::to_string(kGroups) +
         " groups are under way, the most there can be");
  ++group_;
}

void AsyncCopies::wait(unsigned pending) {
  if (group_ > pending) join(group_ - pending);
}

void AsyncCopies::join(uint64_t end) {
  if (end > joined_) joined_ = end;
  size_t done = 0;
  for (; done < under_way_.size() && under_way_[done].group < end; ++done) {
    const Copy& copy = under_way_[done];
    announce(copy);
    if (!copy.moved) move(copy);
  }
  under_way_.erase(under_way_.begin(), under_way_.begin() + static_cast<std::ptrdiff_t>(done));
}

void AsyncCopies::finish() {
  join(group_ + 1);
  joined_ = group_ = issued_ = 0;
}

}  // namespace sim
