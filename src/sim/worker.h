// Runs the blocks of kernels, one at a time, on the OS thread that calls it. Owns what a block needs and
// reuses it: fibers, shared memory, barriers.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/async_copy.h"
#include "sim/control.h"
#include "sim/sanitizer.h"
#include "sim/simt.h"

namespace sim {

/// A kernel launch.
struct Kernel {
  std::string name;
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  std::function<void()> body;
  Order order;

  int64_t blocks() const { return int64_t{grid.x} * grid.y * grid.z; }
  unsigned threads() const { return block.x * block.y * block.z; }
};

class Worker;

/// What a switch between fibers leaves and finds.
struct Fiber {
  boost::context::detail::fcontext_t context = nullptr;
  StackBounds stack;
  void* tsan = nullptr;
};

/// A CUDA thread: a fiber and where it stands. Reused from block to block.
struct Thread {
  Worker* worker = nullptr;
  uint3 index{};
  unsigned rank = 0;      // linear index in the block
  unsigned position = 0;  // in the order in which the block's threads take turns
  bool begun = false;
  bool finished = false;
  bool fenced = false;
  // While waiting: runnable as soon as *epoch differs from seen_epoch.
  const uint32_t* epoch = nullptr;
  uint32_t seen_epoch = 0;
  const char* waiting_in = nullptr;
  Fiber fiber;
  AsyncCopies copies;
};

/// Lanes that meet under one mask. Values and keys are double-buffered by epoch: a lane may arrive at the
/// next meeting before its neighbours have left this one, but not at the one after.
struct Meeting {
  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint32_t epoch = 0;
  const char* operation = nullptr;
  uint64_t values[2][32];
  void* lanes[32];  // of a computation, where no lane comes back before all have been served
  char keys[2];
  Meeting* next = nullptr;
};

/// Storage of one SharedSlot on one worker.
struct SharedStorage {
  const SharedSlot* slot = nullptr;
  void* memory = nullptr;
  size_t bytes = 0;
  SharedStorage* next = nullptr;
};

class Worker {
 public:
  Worker() = default;
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Runs block `rank` of the grid. Throws std::runtime_error naming kernel, block and threads when a
  /// thread threw or some wait for others that will never arrive. Always leaves the worker ready for another
  /// block.
  void run_block(const Kernel& kernel, int64_t rank);

  // For the functions of simt.h, on the running fiber.
  void sync_threads(Thread& self);
  /// Lane values of a meeting of `mask`; valid until the caller's next meeting.
  const uint64_t* meet(Thread& self, const char* operation, uint32_t mask, uint64_t value,
                       bool orders_memory);
  /// As simt.h's warp_compute: the lane that arrives last computes for all.
  void compute(Thread& self, const char* operation, WarpFunction function, void* lane);
  uint32_t active_lanes(const Thread& self) const;
  const Order& order() const { return kernel_->order; }
  void* static_shared(SharedSlot& slot, size_t bytes);
  void* dynamic_shared() const { return dynamic_; }

 private:
  static void fiber_main(boost::context::detail::transfer_t from);
  void prepare(const Kernel& kernel, int64_t rank);
  void reserve_threads(unsigned count);
  void run_threads();
  void cancel_threads();
  void run_thread(Thread& thread);
  Thread* find_runnable(unsigned position, unsigned end) const;
  Thread* find_next(const Thread& self) const;
  void enter(Thread& thread);
  void end_thread(Thread& self);
  void give_way(Thread& self);
  void switch_to_thread(Fiber& from, Thread& to);
  void switch_fibers(Fiber& from, Fiber& to);
  void arrive(boost::context::detail::fcontext_t left, void* fake_stack);
  void wait(Thread& self, const uint32_t* epoch, uint32_t seen, const char* where);
  Meeting& find_meeting(Thread& self, const char* operation, uint32_t mask);
  void note_failure(const std::string& what);
  std::string describe_deadlock() const;

  std::vector<std::unique_ptr<Thread>> pool_;
  std::vector<Thread*> order_;      // the block's threads in the order in which they take turns
  std::vector<Meeting*> meetings_;  // per warp
  SharedStorage* storages_ = nullptr;
  void* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0;

  const Kernel* kernel_ = nullptr;
  Thread** by_rank_ = nullptr;  // raw: read on fibers, where instrumented containers would be seen
  Thread** by_position_ = nullptr;
  std::vector<Thread*> by_rank_storage_;
  Meeting** first_meeting_ = nullptr;
  unsigned thread_count_ = 0;
  unsigned alive_ = 0;
  unsigned arrived_ = 0;
  uint32_t barrier_epoch_ = 0;
  bool cancelled_ = false;
  std::string failure_;
  dim3 prepared_block_{0, 0, 0};

  Fiber scheduler_;  // the caller of run_block
  Fiber* left_ = nullptr;
  Thread* entered_ = nullptr;
  // Separate keys: with one, a finished thread would order the next one to start and hide every race.
  char start_key_ = 0, end_key_ = 0, barrier_keys_[2] = {};
};

}  // namespace sim
