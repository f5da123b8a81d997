#include "sim/async_copy.h"

#include <cstdio>

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

AsyncCopies::~AsyncCopies() {
  if (fiber_ != nullptr) tsan_destroy_fiber(fiber_);
}

/// By words, and volatile: a call of memcpy would count as an access of the CUDA thread.
SIM_INVISIBLE void AsyncCopies::move(const Copy& copy) {
  auto* to = static_cast<volatile uint32_t*>(copy.to);
  const auto* from = static_cast<const volatile uint32_t*>(copy.from);
  for (size_t i = 0; i < copy.bytes / 4; ++i) to[i] = i < copy.source_bytes / 4 ? from[i] : 0;
}

/// As ThreadSanitizer's other thread: reads and writes of a copy, after what the issuing thread did before.
SIM_INVISIBLE void AsyncCopies::announce(const Copy& copy) {
  if (fiber_ == nullptr) fiber_ = tsan_create_fiber();
  tsan_release(&issue_key_);
  void* const self = tsan_current_fiber();
  tsan_switch_to(fiber_);
  tsan_acquire(&issue_key_);
  if (copy.source_bytes > 0) announce_read(copy.from, copy.source_bytes);
  announce_write(copy.to, copy.bytes);
  tsan_switch_to(self);
}

/// The copies of the open group are before whoever waits for it.
SIM_INVISIBLE void AsyncCopies::announce_end() {
  if (fiber_ == nullptr) return;
  void* const self = tsan_current_fiber();
  tsan_switch_to(fiber_);
  tsan_release(&group_keys_[group_ % kGroups]);
  tsan_switch_to(self);
}

void AsyncCopies::issue(void* to, const void* from, size_t bytes, size_t source_bytes, const Order& order) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0)
    fail("cp.async: copies of " + std::to_string(bytes) + " bytes from " + address(from) + " to " +
         address(to) + ": both must be aligned to the size");
  const Copy copy{to, from, bytes, source_bytes, group_};
  if constexpr (kThreadSanitizer) announce(copy);
  if (at_issue(order, issued_++))
    move(copy);
  else
    late_.push_back(copy);
}

void AsyncCopies::commit() {
  if (group_ - joined_ == kGroups)
    fail("cp.async.commit_group: " + std::to_string(kGroups) +
         " groups are under way, the most there can be");
  if constexpr (kThreadSanitizer) announce_end();
  ++group_;
}

void AsyncCopies::wait(unsigned pending) {
  if (group_ > pending) join(group_ - pending);
}

void AsyncCopies::join(uint64_t end) {
  for (; joined_ < end; ++joined_) tsan_acquire(&group_keys_[joined_ % kGroups]);
  size_t moved = 0;
  while (moved < late_.size() && late_[moved].group < end) move(late_[moved++]);
  late_.erase(late_.begin(), late_.begin() + static_cast<std::ptrdiff_t>(moved));
}

void AsyncCopies::finish() {
  for (const Copy& copy : late_) move(copy);
  late_.clear();
  issued_ = 0;
  joined_ = group_;
}

}  // namespace sim
