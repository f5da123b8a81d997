#include "sim/stream.h"

#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "sim/control.h"
#include "sim/counters.h"
#include "sim/failure.h"
#include "sim/sanitizer.h"

namespace sim {
namespace {

void run_operation(const Operation& operation, Team& team) {
  if (failure() != cudaSuccess) return;
  try {
    operation.run(team);
  } catch (const std::exception& error) {
    const InvisibleScope invisible;  // the text is copied through the stack of the host's thread
    set_failure(cudaErrorUnknown, error.what());
  } catch (...) {
    set_failure(cudaErrorUnknown, "a host function threw something that is no std::exception");
  }
}

/// An entry of a queue by raw pointers: the owners' reference counts are atomics that would order streams.
struct Task {
  CUstream_st* stream;
  Mark* wait;
  const Operation* operation;
  Mark* mark;
  bool of_graph;
};

SIM_INVISIBLE void run_task(void* argument) {
  const Task& task = *static_cast<Task*>(argument);
  tsan_acquire(&task.stream->served_key);
  if (task.wait != nullptr) tsan_acquire(&task.wait->key);
  if (task.operation != nullptr) {
    tsan_acquire(const_cast<Operation*>(task.operation));
    run_operation(*task.operation, task.stream->team);
    if (!task.of_graph) delete task.operation;
  }
  if (task.mark != nullptr) tsan_release(&task.mark->key);
  tsan_release(&task.stream->done_key);
}

SIM_INVISIBLE void execute(CUstream_st* stream, const CUstream_st::Entry& entry) {
  Task task{stream, entry.wait.get(), entry.operation, entry.mark.get(), entry.of_graph};
  stream->fiber.run(run_task, &task);
}

}  // namespace

Scheduler::Scheduler() {
  reload_mode();
}

Scheduler::~Scheduler() {
  while (!streams_.empty()) {
    {
      Lock lock(mutex_);
      for (auto& entry : streams_.back()->queue)
        if (!entry.of_graph) delete entry.operation;
      streams_.back()->queue.clear();
    }
    stop(std::move(streams_.back()));
    streams_.pop_back();
  }
  for (cudaEvent_t event : events_) delete event;
}

void Scheduler::reload_mode() {
  const Settings now = settings();
  std::unique_ptr<CUstream_st> retired;
  if (default_ != nullptr) {
    synchronize(cudaStream_t{nullptr});
    Lock lock(mutex_);
    if (streams_.size() == 1) {
      retired = std::move(streams_.back());
      streams_.clear();
      default_ = nullptr;
      default_mark_ = nullptr;
    }
  }
  if (retired) stop(std::move(retired));
  Lock lock(mutex_);
  if (!streams_.empty())
    throw std::logic_error("the simulated device's scheduling mode cannot change while " +
                           std::to_string(streams_.size()) +
                           " streams exist; destroy them, and the executable graphs that own some, first");
  mode_ = now.streams.kind;
  choice_.seed(now.streams.seed);
  clock_ = {};
  owner_ = std::this_thread::get_id();
}

// --- streams ----------------------------------------------------------------------------------------------

CUstream_st& Scheduler::add_stream(unsigned flags) {
  auto& stream = *streams_.emplace_back(std::make_unique<CUstream_st>(flags, settings().workers));
  if (!is_pumped()) stream.thread = std::thread([this, &stream] { serve(stream); });
  return stream;
}

cudaStream_t Scheduler::create_stream(unsigned flags) {
  count_object();
  Lock lock(mutex_);
  return &add_stream(flags);
}

bool Scheduler::exists(cudaStream_t stream) {
  Lock lock(mutex_);
  return stream == nullptr ||
         std::any_of(streams_.begin(), streams_.end(), [=](const auto& s) { return s.get() == stream; });
}

void Scheduler::destroy_stream(cudaStream_t stream) {
  Lock lock(mutex_);
  leave_capture(*stream);
  const auto mark = push_mark(*stream);
  lock.unlock();
  wait_until_done(*mark);
  lock.lock();
  const auto found =
      std::find_if(streams_.begin(), streams_.end(), [=](const auto& s) { return s.get() == stream; });
  auto owned = std::move(*found);
  streams_.erase(found);
  lock.unlock();
  stop(std::move(owned));
}

void Scheduler::stop(std::unique_ptr<CUstream_st> stream) {
  {
    Lock lock(mutex_);
    stream->stopping = true;
  }
  stream->filled.notify_all();
  marked_.notify_all();
  if (stream->thread.get_id() == std::this_thread::get_id()) {
    // The process exits from within an operation: nothing of the stream may go away under it.
    stream.release()->thread.detach();
    return;
  }
  if (stream->thread.joinable()) stream->thread.join();
  const InvisibleScope invisible;  // the host is not ordered after the kernels whose workspace goes away here
  stream.reset();
}

CUstream_st& Scheduler::resolve(cudaStream_t stream) {
  if (stream != nullptr) return *stream;
  if (default_ == nullptr) default_ = &add_stream(cudaStreamDefault);
  return *default_;
}

// --- queues -----------------------------------------------------------------------------------------------

void Scheduler::push(CUstream_st& stream, CUstream_st::Entry entry) {
  stream.queue.push_back(std::move(entry));
  stream.filled.notify_one();
}

void Scheduler::push_ordered(CUstream_st& stream, CUstream_st::Entry entry) {
  if (&stream == default_) {
    for (auto& other : streams_) {
      if (other.get() == default_ || (other->flags & cudaStreamNonBlocking) != 0) continue;
      const auto mark = std::make_shared<Mark>();
      push(*other, {nullptr, nullptr, mark});
      push(stream, {mark, nullptr, nullptr});
    }
    if (!entry.mark) entry.mark = std::make_shared<Mark>();
    default_mark_ = entry.mark;
  } else if ((stream.flags & cudaStreamNonBlocking) == 0 && stream.seen_default != default_mark_) {
    stream.seen_default = default_mark_;
    push(stream, {default_mark_, nullptr, nullptr});
  }
  push(stream, std::move(entry));
}

std::shared_ptr<Mark> Scheduler::push_mark(CUstream_st& stream) {
  auto mark = std::make_shared<Mark>();
  push_ordered(stream, {nullptr, nullptr, mark});
  return mark;
}

cudaError_t Scheduler::add(cudaStream_t stream, Operation operation) {
  auto owned = std::make_unique<Operation>(std::move(operation));
  tsan_release(owned.get());
  Lock lock(mutex_);
  CUstream_st& target = resolve(stream);
  if (const cudaError_t error = admit(target)) return error;
  if (target.capture != nullptr)
    target.capture->add(target.branch, std::move(*owned));
  else
    push_ordered(target, {nullptr, owned.release(), nullptr});
  return cudaSuccess;
}

cudaError_t Scheduler::enqueue(cudaStream_t stream, std::function<void()> operation) {
  return add(stream, {[operation = std::move(operation)](Team&) { operation(); }});
}

cudaError_t Scheduler::enqueue_kernel(cudaStream_t stream, Kernel kernel) {
  auto run = [kernel = std::move(kernel)](Team& team) {
    try {
      team.run(kernel);
    } catch (const std::exception& error) {
      const bool placed = std::string_view(error.what()).starts_with("kernel '");
      set_failure(cudaErrorLaunchFailure,
                  placed ? error.what() : "kernel '" + kernel.name + "': " + error.what());
    }
  };
  return add(stream, {std::move(run)});
}

void Scheduler::at_launch(cudaStream_t stream, std::function<void()> function) {
  {
    Lock lock(mutex_);
    if (Capture* capture = resolve(stream).capture) return capture->at_launch(std::move(function));
  }
  function();
}

void Scheduler::serve(CUstream_st& stream) {
  tsan_release(&stream.served_key);
  omp_set_num_threads(1);  // of the BLAS stand-in: one order of summation, and no threads beyond the workers
  const auto seed = settings().delay_seed;
  std::mt19937_64 delays(seed.value_or(0) + reinterpret_cast<uintptr_t>(&stream));
  Lock lock(mutex_);
  for (;;) {
    stream.filled.wait(lock, [&] { return stream.stopping || !stream.queue.empty(); });
    if (stream.queue.empty()) return;
    if (const auto wait = stream.queue.front().wait)
      marked_.wait(lock, [&] { return stream.stopping || wait->done; });
    if (stream.queue.empty()) return;
    if (seed && stream.queue.front().operation != nullptr) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delays() % 300));
      lock.lock();
    }
    if (!stream.queue.empty()) run_front(lock, stream);
  }
}

void Scheduler::run_front(Lock& lock, CUstream_st& stream) {
  const CUstream_st::Entry entry = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.running = true;
  lock.unlock();
  execute(&stream, entry);
  lock.lock();
  stream.running = false;
  if (entry.mark) {
    entry.mark->done = true;
    entry.mark->when = now();
    marked_.notify_all();
  }
}

// --- the host waits ---------------------------------------------------------------------------------------

void Scheduler::synchronize(cudaStream_t stream) {
  Lock lock(mutex_);
  const auto mark = push_mark(resolve(stream));
  lock.unlock();
  wait_until_done(*mark);
  tsan_acquire(&mark->key);
}

void Scheduler::synchronize_all() {
  std::vector<std::shared_ptr<Mark>> marks;
  {
    Lock lock(mutex_);
    for (auto& stream : streams_) marks.push_back(push_mark(*stream));
  }
  for (const auto& mark : marks) {
    wait_until_done(*mark);
    tsan_acquire(&mark->key);
  }
}

bool Scheduler::query(cudaStream_t stream) {
  Lock lock(mutex_);
  CUstream_st& target = resolve(stream);
  const auto idle = [&] { return target.queue.empty() && !target.running; };
  if (!idle() && is_pumped() && std::this_thread::get_id() == owner_) {
    lock.unlock();
    std::lock_guard pump(pump_mutex_);
    lock.lock();
    run_any(lock);
  }
  if (!idle()) return false;
  tsan_acquire(&target.done_key);
  return true;
}

// --- events -----------------------------------------------------------------------------------------------

cudaEvent_t Scheduler::create_event(unsigned flags) {
  count_object();
  Lock lock(mutex_);
  return *events_.insert(new CUevent_st{flags, nullptr, {}}).first;
}

void Scheduler::destroy_event(cudaEvent_t event) {
  Lock lock(mutex_);
  events_.erase(event);
  delete event;
}

bool Scheduler::exists(cudaEvent_t event) {
  Lock lock(mutex_);
  return events_.contains(event);
}

cudaError_t Scheduler::record(cudaEvent_t event, cudaStream_t stream, bool external) {
  Lock lock(mutex_);
  CUstream_st& target = resolve(stream);
  if (const cudaError_t error = admit(target)) return error;
  if (target.capture != nullptr) {
    record_captured(target, event, external);
    return cudaSuccess;
  }
  if (external) return cudaErrorInvalidValue;
  event->captured.reset();
  event->mark = push_mark(target);
  return cudaSuccess;
}

cudaError_t Scheduler::wait_on_stream(cudaStream_t stream, cudaEvent_t event, bool external) {
  Lock lock(mutex_);
  CUstream_st& target = resolve(stream);
  if (const cudaError_t error = admit(target)) return error;
  if (external && target.capture == nullptr) return cudaErrorInvalidValue;
  if (target.capture != nullptr || event->captured) return wait_captured(target, event, external);
  if (event->mark) push_ordered(target, {event->mark, nullptr, nullptr});
  return cudaSuccess;
}

void Scheduler::synchronize(cudaEvent_t event) {
  Lock lock(mutex_);
  const auto mark = event->mark;
  lock.unlock();
  if (!mark) return;
  wait_until_done(*mark);
  tsan_acquire(&mark->key);
}

bool Scheduler::query(cudaEvent_t event) {
  Lock lock(mutex_);
  const auto mark = event->mark;
  lock.unlock();
  return is_done(mark);
}

std::chrono::steady_clock::time_point Scheduler::reached(cudaEvent_t event) {
  Lock lock(mutex_);
  return event->mark ? event->mark->when : std::chrono::steady_clock::time_point{};
}

}  // namespace sim
