#include "comm/arena.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::comm {
namespace {

void require_equal(Bootstrap& bootstrap, int64_t bytes) {
  const int64_t most = bootstrap.max(bytes), least = -bootstrap.max(-bytes);
  if (most != least)
    throw CommunicationError("the arena has " + std::to_string(bytes) + " bytes on rank " +
                             std::to_string(bootstrap.rank()) + ", but between " + std::to_string(least) +
                             " and " + std::to_string(most) +
                             " over the ranks: it has to be the same on all, who run one config");
}

std::string text_of(ncclResult_t result) {
  if (result == ncclSuccess) return "";
  return std::string(ncclGetErrorString(result)) + ": " + ncclGetLastError(nullptr);
}

/// Why `step` is undone on all ranks, or an empty string on all: `failure` is this rank's, empty if it has
/// none.
std::string agree(Bootstrap& bootstrap, const std::string& step, const std::string& failure) {
  if (bootstrap.max(failure.empty() ? 0 : 1) == 0) return "";
  return step + " failed" + (failure.empty() ? " on another rank" : ": " + failure);
}

/// Memory of ncclMemAlloc, or none with the reason in `refusal`.
cuda::DeviceMemory allocate(Bootstrap& bootstrap, int64_t bytes, std::string& refusal) {
  void* data = nullptr;
  const ncclResult_t result = ncclMemAlloc(&data, narrow<size_t>(bytes));
  refusal = agree(bootstrap, "ncclMemAlloc", text_of(result));
  if (refusal.empty())
    return {static_cast<std::byte*>(data), bytes, [](void* memory) { (void)ncclMemFree(memory); }};
  if (result == ncclSuccess)
    (void)ncclMemFree(data);
  else
    (void)cudaGetLastError();  // reported here, so that it is not met again by a later, innocent call
  return {};
}

/// Ranks that are refused alike meet within a moment; any others are inside NCCL and wait for this one.
Phase after_refusal(const Watchdog* watchdog, const std::string& failure) {
  constexpr double kSeconds = 30;
  const double outer = watchdog != nullptr ? watchdog->phase().limit_s : 0;
  return {.name = "the agreement of all ranks after ncclCommWindowRegister failed on this one (" + failure +
                  "), where the others may wait for it",
          .limit_s = std::min(kSeconds, outer / 2),
          .limit = "it should"};
}

}  // namespace

Arena::Arena(Bootstrap& bootstrap, int64_t bytes, std::vector<Communicator*> communicators,
             Watchdog* watchdog) {
  require_equal(bootstrap, bytes);
  std::erase_if(communicators, [](const Communicator* c) { return c == nullptr || c->size() == 1; });
  std::string refusal;
  if (!communicators.empty() && bytes > 0) memory_ = allocate(bootstrap, bytes, refusal);
  if (memory_.data() == nullptr) memory_ = cuda::DeviceMemory(bytes);
  for (Communicator* communicator : communicators) {
    communicator->facts_.no_window = refusal;
    if (refusal.empty() && bytes > 0) register_with(bootstrap, *communicator, watchdog);
  }
}

// Ranks of other groups take part in the agreement, also those whose group wants no window.
void Arena::register_with(Bootstrap& bootstrap, Communicator& communicator, Watchdog* watchdog) {
  ncclWindow_t window = nullptr;
  std::string failure;
  if (choose_path(communicator.facts_).window) {
    failure = text_of(ncclCommWindowRegister(communicator.comm_, data(), narrow<size_t>(bytes()), &window,
                                             NCCL_WIN_COLL_SYMMETRIC));
    if (failure.empty() && window == nullptr) failure = "NCCL has no windows for these devices";
  }
  if (watchdog != nullptr) watchdog->progress();
  std::optional<InnerPhase> phase;
  if (!failure.empty()) phase.emplace(watchdog, after_refusal(watchdog, failure));
  communicator.facts_.no_window = agree(bootstrap, "ncclCommWindowRegister", failure);
  if (window == nullptr) return;
  if (communicator.facts_.no_window.empty())
    windows_.push_back({&communicator, window});
  else
    (void)ncclCommWindowDeregister(communicator.comm_, window);
}

void Arena::release() {
  if (!windows_.empty()) (void)cudaDeviceSynchronize();
  for (const Window& window : windows_) {
    (void)ncclCommWindowDeregister(window.communicator->comm_, window.handle);
    window.communicator->facts_.no_window = "its arena is gone";
  }
  windows_.clear();
  memory_ = {};
}

Arena::~Arena() {
  release();
}

Arena& Arena::operator=(Arena&& other) noexcept {
  release();
  memory_ = std::move(other.memory_);
  windows_ = std::exchange(other.windows_, {});
  return *this;
}

}  // namespace minillm::comm
