#include "sim/worker.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>

#include "sim/simt_errors.h"
#include "sim/worker_memory.h"

constinit thread_local uint3 threadIdx{0, 0, 0};
constinit thread_local uint3 blockIdx{0, 0, 0};
constinit thread_local dim3 blockDim{1, 1, 1};
constinit thread_local dim3 gridDim{1, 1, 1};

namespace sim {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

thread_local Thread* current = nullptr;
thread_local uint64_t block_serial = 0;  // of blocks run on this OS thread, as SharedSlots are per OS thread

/// Unwinds the fibers of a block that has failed.
struct Cancelled {};

void append_range(std::string& text, unsigned first, unsigned last) {
  if (!text.empty()) text += ", ";
  text += std::to_string(first);
  if (last > first) text.append("-").append(std::to_string(last));
}

}  // namespace

Worker::~Worker() {
  for (auto& thread : pool_) {
    tsan_destroy_fiber(thread->fiber.tsan);
    free_stack(thread->fiber.stack);
  }
  while (storages_ != nullptr) {
    SharedStorage* next = storages_->next;
    std::free(storages_->memory);
    delete storages_;
    storages_ = next;
  }
  for (Meeting* meeting : meetings_)
    while (meeting != nullptr) delete std::exchange(meeting, meeting->next);
  std::free(dynamic_);
}

// --- fibers -----------------------------------------------------------------------------------------------

SIM_FLAT void Worker::fiber_main(transfer_t from) {
  Worker& worker = *static_cast<Worker*>(from.data);
  worker.arrive(from.fctx, nullptr);
  for (;;) {
    Thread& self = *worker.entered_;
    worker.run_thread(self);
    worker.end_thread(self);
  }
}

/// A thread that has not begun takes over the fiber of the one that ends: where none waits, one fiber runs
/// the block. Not under ThreadSanitizer, to which a fiber is a thread.
SIM_INVISIBLE void Worker::end_thread(Thread& self) {
  Thread* const next = find_next(self);
  if (next == nullptr) return switch_fibers(self.fiber, scheduler_);
  if (kThreadSanitizer || next->begun) return switch_to_thread(self.fiber, *next);
  std::swap(self.fiber, next->fiber);
  enter(*next);
}

SIM_INVISIBLE void Worker::run_thread(Thread& thread) {
  thread.begun = true;
  tsan_acquire(&start_key_);
  try {
    kernel_->body();
  } catch (const Cancelled&) {
  } catch (const std::exception& error) {
    note_failure(", thread " + std::to_string(thread.rank) + ": " + error.what());
  } catch (...) {
    note_failure(", thread " + std::to_string(thread.rank) + ": threw something that is no std::exception");
  }
  thread.copies.finish();
  tsan_release(&end_key_);
  thread.finished = true;
  --alive_;
}

SIM_INVISIBLE void Worker::arrive(fcontext_t left, void* fake_stack) {
  StackBounds bounds;
  asan_arrive(fake_stack, &bounds);
  left_->context = left;
  if (left_ == &scheduler_) scheduler_.stack = bounds;
}

SIM_INVISIBLE void Worker::switch_fibers(Fiber& from, Fiber& to) {
  left_ = &from;
  void* fake_stack = nullptr;  // stays with this stack: `from` may belong to another fiber on return
  asan_leave(&fake_stack, to.stack);
  tsan_switch_to(to.tsan);
  const transfer_t back = jump_fcontext(to.context, this);
  arrive(back.fctx, fake_stack);
}

SIM_INVISIBLE void Worker::enter(Thread& thread) {
  current = &thread;
  entered_ = &thread;
  threadIdx = thread.index;
}

SIM_INVISIBLE void Worker::switch_to_thread(Fiber& from, Thread& to) {
  enter(to);
  switch_fibers(from, to.fiber);
}

/// The next thread that can run: of the 32 around the caller while there is one, as their stacks are in the
/// cache, then of those after them. None: the scheduler begins another round.
SIM_INVISIBLE Thread* Worker::find_next(const Thread& self) const {
  if (cancelled_) return nullptr;
  const unsigned first = self.position / 32 * 32, end = std::min(first + 32, thread_count_);
  Thread* next = find_runnable(self.position + 1, end);
  if (next == nullptr) next = find_runnable(first, self.position);
  return next != nullptr ? next : find_runnable(end, thread_count_);
}

SIM_INVISIBLE void Worker::give_way(Thread& self) {
  Thread* const next = find_next(self);
  if (next != nullptr)
    switch_to_thread(self.fiber, *next);
  else
    switch_fibers(self.fiber, scheduler_);
}

SIM_INVISIBLE Thread* Worker::find_runnable(unsigned position, unsigned end) const {
  for (; position < end; ++position) {
    Thread* const thread = by_position_[position];
    if (!thread->finished && (thread->epoch == nullptr || *thread->epoch != thread->seen_epoch))
      return thread;
  }
  return nullptr;
}

SIM_INVISIBLE void Worker::wait(Thread& self, const uint32_t* epoch, uint32_t seen, const char* where) {
  self.epoch = epoch;
  self.seen_epoch = seen;
  self.waiting_in = where;
  give_way(self);
  self.epoch = nullptr;
  if (cancelled_) throw Cancelled{};
}

// --- blocks -----------------------------------------------------------------------------------------------

void Worker::reserve_threads(unsigned count) {
  while (pool_.size() < count) {
    auto thread = std::make_unique<Thread>();
    thread->worker = this;
    thread->rank = static_cast<unsigned>(pool_.size());
    thread->fiber.stack = allocate_stack(kStackBytes);
    // Tops at different offsets in a page: at equal ones the threads of a warp evict each other's lines.
    const size_t offset = size_t{128} * (thread->rank % 32);
    thread->fiber.context =
        make_fcontext(thread->fiber.stack.top() - offset, kStackBytes - offset, &Worker::fiber_main);
    thread->fiber.tsan = tsan_create_fiber();
    by_rank_storage_.push_back(thread.get());
    pool_.push_back(std::move(thread));
  }
  by_rank_ = by_rank_storage_.data();
  meetings_.resize(std::max<size_t>(meetings_.size(), (count + 31) / 32));
  first_meeting_ = meetings_.data();
}

/// Invisible as a whole: under a seeded scheduler unordered streams take turns on one thread's blockIdx.
SIM_INVISIBLE void Worker::prepare(const Kernel& kernel, int64_t rank) {
  kernel_ = &kernel;
  thread_count_ = kernel.threads();
  if (pool_.size() < thread_count_) reserve_threads(thread_count_);
  const dim3 shape = kernel.block;
  if (shape.x != prepared_block_.x || shape.y != prepared_block_.y || shape.z != prepared_block_.z) {
    for (unsigned i = 0; i < thread_count_; ++i)
      by_rank_[i]->index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
    prepared_block_ = shape;
  }
  order_.assign(by_rank_, by_rank_ + thread_count_);
  if (kernel.order.kind == Order::Kind::kReverse) std::reverse(order_.begin(), order_.end());
  if (kernel.order.kind == Order::Kind::kShuffle) {
    std::mt19937_64 generator(kernel.order.seed + static_cast<uint64_t>(rank));
    std::shuffle(order_.begin(), order_.end(), generator);
  }
  if (dynamic_bytes_ != kernel.shared_bytes) {
    std::free(std::exchange(dynamic_, nullptr));
    dynamic_bytes_ = kernel.shared_bytes;
    if (dynamic_bytes_ > 0) dynamic_ = allocate_shared(dynamic_bytes_);
  }
  if (dynamic_bytes_ > 0) poison(dynamic_, dynamic_bytes_);
  const auto r = static_cast<uint64_t>(rank);
  blockIdx = {static_cast<unsigned>(r % kernel.grid.x),
              static_cast<unsigned>(r / kernel.grid.x % kernel.grid.y),
              static_cast<unsigned>(r / kernel.grid.x / kernel.grid.y)};
  blockDim = kernel.block;
  gridDim = kernel.grid;
  ++block_serial;
}

SIM_INVISIBLE void Worker::run_block(const Kernel& kernel, int64_t rank) {
  prepare(kernel, rank);
  by_position_ = order_.data();
  for (unsigned i = 0; i < thread_count_; ++i) {
    by_position_[i]->position = i;
    by_position_[i]->begun = by_position_[i]->finished = false;
    by_position_[i]->fenced = false;
  }
  scheduler_.tsan = tsan_current_fiber();
  tsan_release(&start_key_);
  run_threads();
  tsan_acquire(&end_key_);
  if (cancelled_) {
    cancelled_ = false;
    arrived_ = 0;
    for (Meeting* first : meetings_)
      for (Meeting* meeting = first; meeting != nullptr; meeting = meeting->next) meeting->arrived = 0;
    throw std::runtime_error(failure_);
  }
}

SIM_FLAT void Worker::run_threads() {
  alive_ = thread_count_;
  while (alive_ > 0 && !cancelled_) {
    if (Thread* const first = find_runnable(0, thread_count_))
      switch_to_thread(scheduler_, *first);
    else
      note_failure(": " + describe_deadlock());
  }
  if (cancelled_) cancel_threads();
}

/// Ends every thread: those inside the kernel unwind from where they wait, those not yet started never do.
SIM_INVISIBLE void Worker::cancel_threads() {
  for (unsigned i = 0; i < thread_count_; ++i)
    if (!by_rank_[i]->finished && by_rank_[i]->epoch != nullptr) switch_to_thread(scheduler_, *by_rank_[i]);
}

/// The first failure is the block's; later ones are its consequences.
void Worker::note_failure(const std::string& what) {
  if (cancelled_) return;
  cancelled_ = true;
  failure_ = "kernel '" + kernel_->name + "', block (" + std::to_string(blockIdx.x) + ", " +
             std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ")" + what;
}

/// Which threads of the block wait where, and which have returned; numbers are linear thread indices.
std::string Worker::describe_deadlock() const {
  std::vector<std::pair<std::string, std::string>> groups;  // place, threads
  for (unsigned first = 0; first < thread_count_;) {
    const auto where = [this](unsigned i) -> std::string {
      return by_rank_[i]->finished ? "returned" : std::string("wait in ") + by_rank_[i]->waiting_in;
    };
    const std::string group = where(first);
    unsigned last = first;
    while (last + 1 < thread_count_ && where(last + 1) == group) ++last;
    auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == group; });
    if (found == groups.end()) found = groups.insert(groups.end(), {group, ""});
    append_range(found->second, first, last);
    first = last + 1;
  }
  std::string text = "threads wait for others that never arrive:";
  for (const auto& [group, threads] : groups) text += " " + threads + " " + group + ";";
  text.pop_back();
  return text + " (of " + std::to_string(thread_count_) + " threads)";
}

// --- meetings of threads ----------------------------------------------------------------------------------

SIM_INVISIBLE void Worker::sync_threads(Thread& self) {
  const uint32_t epoch = barrier_epoch_;
  // Two keys: a thread that already arrives at the next barrier must not be seen by one still leaving this
  // one.
  void* key = &barrier_keys_[epoch & 1];
  tsan_release(key);
  if (++arrived_ == thread_count_) {
    arrived_ = 0;
    ++barrier_epoch_;
  } else {
    wait(self, &barrier_epoch_, epoch, "__syncthreads");
  }
  tsan_acquire(key);
}

SIM_INVISIBLE Meeting& Worker::find_meeting(Thread& self, const char* operation, uint32_t mask) {
  const unsigned warp = self.rank / 32, lane = self.rank % 32;
  const uint32_t existing = ~uint32_t{0} >> (32 - std::min(32u, thread_count_ - warp * 32));
  if ((mask >> lane & 1) == 0 || (mask & ~existing) != 0) fail_mask(operation, mask, lane, existing);
  for (Meeting* meeting = first_meeting_[warp]; meeting != nullptr; meeting = meeting->next)
    if (meeting->mask == mask) return *meeting;
  auto* meeting = new Meeting;
  meeting->mask = mask;
  meeting->next = first_meeting_[warp];
  first_meeting_[warp] = meeting;
  return *meeting;
}

SIM_INVISIBLE const uint64_t* Worker::meet(Thread& self, const char* operation, uint32_t mask, uint64_t value,
                                           bool orders_memory) {
  Meeting& meeting = find_meeting(self, operation, mask);
  const uint32_t epoch = meeting.epoch;
  void* key = &meeting.keys[epoch & 1];
  uint64_t* values = meeting.values[epoch & 1];
  if (meeting.arrived == 0) meeting.operation = operation;
  if (meeting.operation != operation) fail_meeting(operation, meeting.operation);
  if (orders_memory) tsan_release(key);
  values[self.rank % 32] = value;
  meeting.arrived |= uint32_t{1} << self.rank % 32;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.epoch;
  } else {
    wait(self, &meeting.epoch, epoch, operation);
  }
  if (orders_memory) tsan_acquire(key);
  return values;
}

SIM_INVISIBLE void Worker::compute(Thread& self, const char* operation, WarpFunction function, void* lane) {
  constexpr uint32_t kAll = ~uint32_t{0};
  Meeting& meeting = find_meeting(self, operation, kAll);
  const uint32_t epoch = meeting.epoch;
  if (meeting.arrived == 0) meeting.operation = operation;
  if (meeting.operation != operation) fail_meeting(operation, meeting.operation);
  meeting.lanes[self.rank % 32] = lane;
  meeting.arrived |= uint32_t{1} << self.rank % 32;
  if (meeting.arrived != kAll) return wait(self, &meeting.epoch, epoch, operation);
  function(meeting.lanes);
  meeting.arrived = 0;
  ++meeting.epoch;
}

SIM_INVISIBLE uint32_t Worker::active_lanes(const Thread& self) const {
  const unsigned first = self.rank / 32 * 32, end = std::min(first + 32, thread_count_);
  uint32_t lanes = 0;
  for (unsigned i = first; i < end; ++i) lanes |= uint32_t{!by_rank_[i]->finished} << (i - first);
  return lanes;
}

SIM_INVISIBLE void* Worker::static_shared(SharedSlot& slot, size_t bytes) {
  if (slot.block == block_serial) return slot.storage;
  SharedStorage* storage = storages_;
  while (storage != nullptr && (storage->slot != &slot || storage->bytes != bytes)) storage = storage->next;
  if (storage == nullptr)
    storage = storages_ = new SharedStorage{&slot, allocate_shared(bytes), bytes, storages_};
  poison(storage->memory, bytes);
  slot.storage = storage->memory;
  slot.block = block_serial;
  return slot.storage;
}

// --- simt.h -----------------------------------------------------------------------------------------------

SIM_INVISIBLE void* static_shared(SharedSlot& slot, size_t bytes) {
  return current->worker->static_shared(slot, bytes);
}
SIM_INVISIBLE void* dynamic_shared() {
  return current->worker->dynamic_shared();
}
SIM_FLAT void sync_threads() {
  current->worker->sync_threads(*current);
}
SIM_FLAT void sync_warp(uint32_t mask) {
  current->worker->meet(*current, "__syncwarp", mask, 0, true);
}
SIM_INVISIBLE uint32_t active_lanes() {
  return current->worker->active_lanes(*current);
}
SIM_FLAT const uint64_t* lane_values(const char* name, uint64_t value) {
  return current->worker->meet(*current, name, ~uint32_t{0}, value, false);
}
void fail_matrix_row(uint64_t address) {
  fail("ldmatrix: row address " + std::to_string(address) + " is not a multiple of 16");
}
SIM_FLAT void warp_compute(const char* name, WarpFunction compute, void* lane) {
  current->worker->compute(*current, name, compute, lane);
}
SIM_INVISIBLE bool meets_at_once() {
  return !kThreadSanitizer && current->worker->order().kind == Order::Kind::kForward;
}
void async_copy(void* to, const void* from, size_t bytes, bool exists) {
  current->copies.issue(to, from, bytes, exists, current->worker->order());
}
void async_commit() {
  current->copies.commit();
}
void async_wait(unsigned pending) {
  current->copies.wait(pending);
}
SIM_INVISIBLE void thread_fence() {
  current->fenced = true;
}
SIM_INVISIBLE bool has_fenced() {
  return current->fenced;
}

SIM_FLAT uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int operand, int width) {
  static constexpr const char* kNames[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                           "__shfl_xor_sync"};
  Thread& self = *current;
  const char* name = kNames[static_cast<int>(kind)];
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail_width(name, width);
  const uint64_t* values = self.worker->meet(self, name, mask, bits, false);
  const int lane = static_cast<int>(self.rank % 32), first = lane & -width;
  int source = lane;
  switch (kind) {
    case Shuffle::kIndex:
      source = first + (operand & (width - 1));
      break;
    case Shuffle::kUp:
      source = lane - operand < first ? lane : lane - operand;
      break;
    case Shuffle::kDown:
      source = lane + operand >= first + width ? lane : lane + operand;
      break;
    case Shuffle::kXor:
      // Lower segments may be read, higher ones not.
      source = (lane ^ operand) >= first + width ? lane : lane ^ operand;
      break;
  }
  return (mask >> (source & 31) & 1) != 0 ? values[source & 31] : ~uint64_t{0};
}

SIM_FLAT uint32_t ballot(const char* name, uint32_t mask, bool predicate) {
  const uint64_t* values = current->worker->meet(*current, name, mask, predicate, false);
  uint32_t lanes = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) lanes |= static_cast<uint32_t>(values[i]) << i;
  return lanes;
}

}  // namespace sim
