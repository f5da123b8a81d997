#include "sim/team.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace sim {

struct Team::Job {
  const Kernel* kernel = nullptr;
  std::vector<int64_t> shuffled;  // empty unless the order is a shuffle
  std::atomic<int64_t> next = 0;
  std::atomic<bool> failed = false;
  std::exception_ptr failure;

  int64_t block(int64_t position) const {
    switch (kernel->order.kind) {
      case Order::Kind::kForward:
        return position;
      case Order::Kind::kReverse:
        return kernel->blocks() - 1 - position;
      case Order::Kind::kShuffle:
        return shuffled[static_cast<size_t>(position)];
    }
    return position;
  }
};

Team::Team(int workers) {
  for (int i = 0; i < workers; ++i) workers_.push_back(std::make_unique<Worker>());
}

Team::~Team() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void Team::run_blocks(Worker& worker, Job& job) {
  const int64_t blocks = job.kernel->blocks();
  try {
    // Relaxed: blocks of a kernel are not ordered with each other.
    while (!job.failed.load(std::memory_order_relaxed)) {
      const int64_t position = job.next.fetch_add(1, std::memory_order_relaxed);
      if (position >= blocks) return;
      worker.run_block(*job.kernel, job.block(position));
    }
  } catch (...) {
    if (!job.failed.exchange(true)) job.failure = std::current_exception();
  }
}

void Team::run(const Kernel& kernel) {
  Job job;
  job.kernel = &kernel;
  if (kernel.order.kind == Order::Kind::kShuffle) {
    job.shuffled.resize(static_cast<size_t>(kernel.blocks()));
    std::iota(job.shuffled.begin(), job.shuffled.end(), int64_t{0});
    std::mt19937_64 generator(kernel.order.seed);
    std::shuffle(job.shuffled.begin(), job.shuffled.end(), generator);
  }
  const bool alone = workers_.size() == 1 || kernel.blocks() == 1;
  if (!alone) {
    if (helpers_.empty()) start_helpers();
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      ++job_number_;
    }
    changed_.notify_all();
  }
  run_blocks(*workers_.front(), job);
  if (!alone) {
    // A helper that wakes up only now finds no job; those at work are waited for.
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    changed_.wait(lock, [this] { return busy_ == 0; });
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

void Team::start_helpers() {
  for (size_t i = 1; i < workers_.size(); ++i) helpers_.emplace_back([this, i] { help(*workers_[i]); });
}

void Team::help(Worker& worker) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || (job_ != nullptr && job_number_ != seen); });
    if (stopping_) return;
    seen = job_number_;
    Job* job = job_;
    ++busy_;
    lock.unlock();
    run_blocks(worker, *job);
    lock.lock();
    if (--busy_ == 0) changed_.notify_all();
  }
}

}  // namespace sim
