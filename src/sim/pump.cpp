// How operations run in the modes without threads: one at a time, while the host waits or queries.
#include <omp.h>

#include <stdexcept>
#include <string>

#include "sim/counters.h"
#include "sim/device.h"
#include "sim/sanitizer.h"

namespace sim {

bool Scheduler::run_any(Lock& lock) {
  std::vector<CUstream_st*> ready;
  for (auto& stream : streams_)
    if (!stream->queue.empty() && (!stream->queue.front().wait || stream->queue.front().wait->done))
      ready.push_back(stream.get());
  if (ready.empty()) return false;
  run_front(lock, mode_ == Streams::Kind::kClock ? choose_by_clock(ready) : draw(ready));
  return true;
}

// Drawn only where there is a choice: ranks that differ in the length of a queue served alone (initial
// values, say) then still choose alike.
CUstream_st& Scheduler::draw(const std::vector<CUstream_st*>& ready) {
  return *ready[ready.size() > 1 ? choice_() % ready.size() : 0];
}

// What takes no time comes first, so that all that can be in progress is before time moves on. The order
// depends on nothing but the program: ranks choose alike.
CUstream_st& Scheduler::choose_by_clock(const std::vector<CUstream_st*>& ready) {
  const auto work = [](const CUstream_st* stream) {
    const Operation* operation = stream->queue.front().operation;
    return operation != nullptr ? operation->work : VirtualWork{};
  };
  for (CUstream_st* stream : ready)
    if (work(stream).latency_s <= 0 && work(stream).busy_s <= 0) return *stream;
  for (CUstream_st* stream : ready) clock_.begin(*stream, work(stream));
  return clock_.advance();
}

std::chrono::steady_clock::time_point Scheduler::now() const {
  using SteadyClock = std::chrono::steady_clock;
  if (mode_ != Streams::Kind::kClock) return SteadyClock::now();
  const std::chrono::duration<double> virtual_s(clock_.now_s());
  return SteadyClock::time_point(std::chrono::duration_cast<SteadyClock::duration>(virtual_s));
}

void Scheduler::wait_until_done(const Mark& mark) {
  count_host_wait();
  if (!is_pumped()) {
    Lock lock(mutex_);
    marked_.wait(lock, [&] { return mark.done; });
    return;
  }
  omp_set_num_threads(1);
  std::lock_guard pump(pump_mutex_);
  Lock lock(mutex_);
  while (!mark.done)
    if (!run_any(lock)) throw std::logic_error("simulated streams wait for each other in a circle");
}

bool Scheduler::is_done(const std::shared_ptr<Mark>& mark) {
  if (!mark) return true;
  Lock lock(mutex_);
  if (!mark->done && is_pumped() && std::this_thread::get_id() == owner_) {
    lock.unlock();
    std::lock_guard pump(pump_mutex_);
    lock.lock();
    run_any(lock);
  }
  if (mark->done) tsan_acquire(&mark->key);
  return mark->done;
}

cudaError_t Scheduler::enqueue_work(cudaStream_t stream, const VirtualWork& work) {
  if (mode_ != Streams::Kind::kClock)
    throw std::logic_error("operations in virtual time need the simulated device's mode 'clock'");
  return add(stream, {[](Team&) {}, work});
}

std::vector<VirtualEnd> Scheduler::take_virtual_ends() {
  Lock lock(mutex_);
  return clock_.take_ends();
}

void enqueue_work(cudaStream_t stream, const VirtualWork& work) {
  if (const cudaError_t error = device().scheduler.enqueue_work(stream, work))
    throw std::logic_error("the capture of a stream does not admit an operation in virtual time: error " +
                           std::to_string(error));
}

std::vector<VirtualEnd> take_virtual_ends() {
  return device().scheduler.take_virtual_ends();
}

}  // namespace sim
