// The worker threads of one stream: they share out a kernel's blocks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sim/worker.h"

namespace sim {

/// Not thread safe: belongs to one stream, whose operations follow one another.
class Team {
 public:
  explicit Team(int workers);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Runs all blocks, the calling thread among the workers. Rethrows the first failure of a block; blocks not
  /// yet begun are then left out.
  void run(const Kernel& kernel);

 private:
  struct Job;
  void start_helpers();
  void help(Worker& worker);
  static void run_blocks(Worker& worker, Job& job);

  std::vector<std::unique_ptr<Worker>> workers_;  // the first is the calling thread's
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Job* job_ = nullptr;
  uint64_t job_number_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
};

}  // namespace sim
