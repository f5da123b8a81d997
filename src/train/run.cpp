#include "train/run.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>

#include "comm/affinity.h"
#include "comm/failure.h"
#include "comm/watchdog.h"
#include "core/error.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "data/token_source.h"
#include "shard/hardware.h"
#include "train/agreement.h"
#include "train/console.h"
#include "train/phases.h"
#include "train/policy_search.h"
#include "train/reporter.h"
#include "train/trainer.h"
#include "train/weights.h"

namespace minillm::train {
namespace {

void choose_device(const comm::Bootstrap& bootstrap) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices));
  cuda::check(cudaSetDevice(bootstrap.local_rank() % devices));
}

std::string start_line(const config::Config& config, const Trainer& trainer, const data::TokenSource& source,
                       int world) {
  return "minillm: " + std::to_string(trainer.layout().elements()) + " parameters in " +
         std::string(name_of(config.precision.param)) + " over " + std::to_string(world) +
         (world == 1 ? " rank, " : " ranks, ") + std::to_string(trainer.memory().bytes) +
         " bytes planned per device; data: " + source.describe();
}

/// What "auto" takes times from: parallel.hardware, or the description whose name is in that of the device;
/// with as many ranks on a node as there are.
shard::Hardware hardware_of(const config::Config& config, const comm::Bootstrap& bootstrap) {
  const auto found = [&]() -> shard::Hardware {
    if (const std::string& given = config.parallel.hardware; !given.empty())
      return shard::find_hardware(given);
    cudaDeviceProp properties;
    cuda::check(cudaGetDeviceProperties(&properties, 0));
    std::string device = properties.name;
    std::ranges::transform(device, device.begin(), [](unsigned char c) { return std::tolower(c); });
    for (const std::string& name : shard::hardware_names())
      if (device.find(name) != std::string::npos) return shard::hardware_by_name(name);
    throw UsageError("parallel.policy is \"auto\", but nothing is known of the speed of '" +
                     std::string(properties.name) +
                     "': set parallel.hardware to a name that `minillm plan --help` lists, or to a file that "
                     "`minillm bench --json` wrote on it");
  };
  shard::Hardware hardware = found();
  if (hardware.link) hardware.link->ranks = bootstrap.local_size();
  return hardware;
}

/// All ranks choose alike, and that is checked: they have the same figures, and the memory of the rank that
/// has least.
config::Config with_chosen_policy(const config::Config& config, comm::Bootstrap& bootstrap) {
  if (config.parallel.policy != "auto") return config;
  const World world{bootstrap.size(), bootstrap.local_size()};
  const shard::Hardware hardware = hardware_of(config, bootstrap);
  const int64_t bytes = config.memory.available(-bootstrap.max(-cuda::device_capacity().free));
  const PolicySearch search = search_policy(config, world, hardware, bytes);
  if (search.best && bootstrap.rank() == 0)  // else the error has the table
    std::cout << "policies on " << hardware.name << ", the fastest that fits marked:\n"
              << search.table() << std::flush;
  config::Config chosen = chosen_of(search, world, bytes);
  require_same_choice(chosen, hardware.name, bootstrap);
  return chosen;
}

/// What is about to run, how collectives travel, what the device holds beside the plan, and `binding`, a
/// warning or empty.
void print_start(const config::Config& config, const Trainer& trainer, const data::TokenSource& source,
                 int world, const std::string& binding) {
  std::cout << start_line(config, trainer, source, world) << "\n";
  if (!binding.empty()) std::cout << binding << "\n";
  std::string remark;
  for (const comm::Communicator* communicator : trainer.communicators()) {
    std::cout << communicator->describe() << "\n";
    if (config.train.cuda_graph && remark.empty()) remark = comm::graph_remark(communicator->facts());
  }
  if (!remark.empty()) std::cout << "warning: " << remark << "\n";
  const cuda::DeviceCapacity capacity = cuda::device_capacity();
  std::cout << capacity.total - capacity.free - trainer.memory().bytes
            << " bytes of the device are in use outside the plan (context, libraries, other processes)"
            << std::endl;
}

/// The steps from 0 to `steps`. One runs ahead of the host, so that the device never waits for a result to be
/// printed.
void train_steps(Trainer& trainer, const config::Config& config, const data::TokenSource& source,
                 const comm::Bootstrap& bootstrap, int64_t steps,
                 const std::function<void(int64_t)>& finish) {
  for (int64_t step = 0; step < steps; ++step) {
    data::read_batch(source, step, bootstrap.size(), bootstrap.rank(),
                     config.train.grad_accumulation * config.train.micro_batch, trainer.tokens(step),
                     trainer.targets(step));
    trainer.enqueue(step);
    if (step > 0) finish(step - 1);
  }
  finish(steps - 1);
}

void train(Trainer& trainer, const config::Config& config, const data::TokenSource& source,
           comm::Bootstrap& bootstrap, comm::Watchdog& watchdog,
           const std::function<void(int64_t, const StepResult&)>& report) {
  const int64_t steps = config.train.stop_after > 0 ? std::min(config.train.stop_after, config.train.steps)
                                                    : config.train.steps;
  watchdog.enter(step(config, 0));
  train_steps(trainer, config, source, bootstrap, steps, [&](int64_t number) {
    const StepResult result = trainer.result(number);
    watchdog.enter(reporting(config, number));
    report(number, result);
    watchdog.enter(step(config, number + 1));
  });
}

void save(Trainer& trainer, const config::Config& config, comm::Bootstrap& bootstrap,
          comm::Watchdog& watchdog) {
  const std::string path = weights_path(config.checkpoint.dir);
  watchdog.enter(saving(config, path, bootstrap.rank()));
  save_weights(trainer, config, bootstrap, config.checkpoint.dir, [&] { watchdog.progress(); });
  if (bootstrap.rank() == 0) std::cout << "saved " << path << std::endl;
}

/// All that the other ranks take part in. `console` is rank 0's.
void run_together(const config::Config& given, comm::Bootstrap& bootstrap, const RunOptions& options,
                  Console* console) {
  comm::Watchdog watchdog(bootstrap, start_up(given, "comparing what the ranks were given"));
  require_agreement(given, options.program, bootstrap);
  watchdog.enter(start_up(given, "reading data"));
  // Everything that can be wrong with files is found before the first step.
  Reporter reporter(given, bootstrap, options.log_dir);
  const std::unique_ptr<FileLock> weights_are_ours = reserve_weights(given, bootstrap);
  const std::unique_ptr<data::TokenSource> source = data::make_token_source(given);
  choose_device(bootstrap);
  watchdog.enter(start_up(given, "planning"));
  const config::Config config = with_chosen_policy(given, bootstrap);
  Trainer trainer(config, bootstrap, {.watchdog = &watchdog});
  comm::or_end_job(bootstrap, [&] {
    const std::string binding = comm::affinity_warning(bootstrap);
    if (bootstrap.rank() == 0) print_start(config, trainer, *source, bootstrap.size(), binding);
    reporter.start_clock();
    train(trainer, config, *source, bootstrap, watchdog, [&](int64_t number, const StepResult& result) {
      reporter.report(number, result);
      if (console != nullptr) console->check();
    });
    reporter.finish();
    if (!config.checkpoint.dir.empty()) save(trainer, config, bootstrap, watchdog);
  });
  watchdog.enter(ending(config));  // communicators wait for each other when they are destroyed
}

/// How long an error waits for the reader of what was printed before it: others must not wait for that.
std::optional<std::chrono::seconds> patience_of(const comm::Bootstrap& bootstrap) {
  if (bootstrap.size() == 1) return std::nullopt;
  return std::chrono::seconds(1);
}

}  // namespace

void run(const config::Config& config, comm::Bootstrap& bootstrap, const RunOptions& options) {
  if (bootstrap.rank() != 0) return run_together(config, bootstrap, options, nullptr);
  Console console(std::cout, STDOUT_FILENO, patience_of(bootstrap));
  run_together(config, bootstrap, options, &console);
  console.finish();  // may take as long as the reader likes: nobody watches any more
}

}  // namespace minillm::train
