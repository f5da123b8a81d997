#include "train/trainer.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "checkpoint/safetensors.h"
#include "comm/failure.h"
#include "core/checked.h"
#include "core/split_float.h"
#include "cuda/check.h"
#include "kernels/initialize.h"
#include "kernels/split.h"
#include "model/parameters.h"
#include "train/gemm_choices.h"
#include "train/memory_advice.h"
#include "train/phases.h"
#include "train/weights_file.h"

namespace minillm::train {
namespace {

/// Calls visit(parameter, slice, piece) for each parameter with elements in this rank's shard.
template <class Visit>
void for_each_piece(const config::Model& model, const shard::Layout& layout, int rank, Visit visit) {
  uint64_t number = 0;
  model::for_each_parameter(model, [&](const model::Parameter& parameter) {
    const shard::UnitLayout& unit = layout.units[static_cast<size_t>(parameter.unit)];
    const auto slice = std::ranges::find(unit.slices, parameter.name, &shard::Slice::name);
    const shard::ShardPiece piece = shard::shard_piece(unit, *slice, rank);
    if (piece.count > 0) visit(parameter, number, piece);
    ++number;
  });
}

}  // namespace

Trainer::Trainer(const config::Config& config, comm::Bootstrap& bootstrap, const TrainerOptions& options)
    : rank_(bootstrap.rank()),
      plan_(make_step_plan(config, {bootstrap.size(), bootstrap.local_size()},
                           {.rank = bootstrap.rank(),
                            .keep_gradients = options.keep_gradients,
                            .deferred_blocks = options.deferred_blocks})),
      watchdog_(options.watchdog) {
  require_fit(plan_, {bootstrap.size(), bootstrap.local_size()}, cuda::device_capacity());
  if (config.model.init != "pytorch")
    require_tensors(checkpoint::SafetensorsReader(config.model.init), config.model);
  // Here, because an error that leaves the constructor destroys the communicators before anybody can catch
  // it.
  comm::or_end_job(bootstrap, [&] { assemble(bootstrap, options.edit_waits); });
}

void Trainer::assemble(comm::Bootstrap& bootstrap, const WaitEdit& edit_waits) {
  const config::Config& config = plan_.config;
  make_communicators(bootstrap);
  if (edit_waits) edit_waits(plan_.schedule, plan_.waits);
  executor_ = std::make_unique<shard::Executor>(
      plan_.schedule, *plan_.layout, plan_.memory, plan_.waits, *plan_.program,
      shard::Communicators{gather_.get(), reduce_.get(), replicate_.get()}, arena_.data(),
      config.precision.param, config.train.cuda_graph ? shard::Launch::kGraph : shard::Launch::kEager);
  if (!config.gemm.deterministic) choose_algorithms(bootstrap);
  fill_initial_values();
}

// All ranks make the same ones in the same order.
void Trainer::make_communicators(comm::Bootstrap& bootstrap) {
  const auto [shards, replicas] = plan_.division;
  const config::Parallel& parallel = plan_.config.parallel;
  const comm::InnerPhase phase(watchdog_, start_up(plan_.config, "making communicators"));
  const cuda::DeviceCapacity before = cuda::device_capacity();
  std::vector<comm::Communicator*> all;
  const auto make = [&](const char* name, const comm::Group& group, int64_t ctas, bool zero_ctas) {
    auto made = std::make_unique<comm::Communicator>(
        bootstrap, comm::Communicator::Options{
                       .name = name, .group = group, .max_ctas = narrow<int>(ctas), .zero_ctas = zero_ctas});
    all.push_back(made.get());
    watches_.emplace_back(watchdog_, *made);
    progress();
    return made;
  };
  if (shards > 1) {
    const comm::Group group = comm::shard_group(rank_, bootstrap.size(), shards);
    // Copy engines keep count of eager collectives in a way that captured ones do not follow.
    const bool copy_engines = parallel.copy_engines && !plan_.config.train.cuda_graph;
    gather_ = make("gather", group, parallel.gather_ctas, copy_engines);
    reduce_ = make("reduce", group, parallel.reduce_ctas, false);
  }
  if (replicas > 1)
    replicate_ =
        make("replicate", comm::replica_group(rank_, bootstrap.size(), shards), parallel.reduce_ctas, false);
  try {
    arena_ = comm::Arena(bootstrap, plan_.memory.bytes, all, watchdog_);
  } catch (const MemoryError& error) {
    throw reserve_too_small(plan_, {bootstrap.size(), bootstrap.local_size()}, error.what(), before,
                            cuda::device_capacity());
  }
}

void Trainer::progress() {
  if (watchdog_ != nullptr) watchdog_->progress();
}

Trainer::~Trainer() {
  // Members die in an order that suits their owners, not the device: let it finish first.
  (void)cudaDeviceSynchronize();
}

// A whole step on zeros, before there is anything to lose: it visits every product in its place, with the
// alignments that it will have. Then the arena is scratch memory for timing.
void Trainer::choose_algorithms(comm::Bootstrap& bootstrap) {
  const comm::InnerPhase phase(watchdog_, start_up_with_step(plan_.config, "timing matrix products"));
  const cuda::Stream stream;
  cuda::check(cudaMemsetAsync(arena_.data(), 0, static_cast<size_t>(arena_.bytes()), stream.get()));
  stream.synchronize();
  enqueue(0);
  executor_->synchronize();
  progress();
  executor_->weights_changed();
  choose_gemms(program().blas(), plan_.config.gemm, bootstrap,
               std::span(arena_.data(), static_cast<size_t>(arena_.bytes())), stream.get(),
               [this] { progress(); });
}

// All on one stream: default-stream copies and sets are not ordered with the non-blocking streams that
// kernels run on.
void Trainer::fill_initial_values() {
  const config::Config& config = plan_.config;
  const comm::InnerPhase phase(watchdog_, start_up(config, "reading initial values"));
  const cuda::Stream stream;
  // Moments start at zero and so does padding; all else in the arena is written before it is read.
  for (int unit = 0; unit < std::ssize(layout().units); ++unit) {
    zero_moments(unit, stream);
    if (config.precision.param == DType::kFp32)
      cuda::check(cudaMemsetAsync(
          masters_in_fp32(unit), 0,
          static_cast<size_t>(layout().units[static_cast<size_t>(unit)].shard_elements) * sizeof(float),
          stream.get()));
  }
  const int rope = program().transformer().rope_table();
  if (rope >= 0) {
    const std::vector<float2> table = program().transformer().rope_table_values();
    cuda::check(cudaMemcpyAsync(arena_.data() + plan_.memory.buffer[static_cast<size_t>(rope)], table.data(),
                                table.size() * sizeof(float2), cudaMemcpyHostToDevice, stream.get()));
  }
  if (config.model.init == "pytorch") {
    for_each_piece(config.model, layout(), shard(),
                   [&](const model::Parameter& p, uint64_t number, auto& piece) {
                     kernels::initialize({.out = masters_in_fp32(p.unit) + piece.shard_offset,
                                          .first = piece.tensor_offset,
                                          .count = piece.count,
                                          .distribution = p.distribution,
                                          .a = p.a,
                                          .seed = static_cast<uint64_t>(config.train.seed),
                                          .stream = number},
                                         stream.get());
                   });
  } else {
    fill_from_file(stream);
  }
  if (config.precision.param != DType::kFp32)
    for (int unit = 0; unit < std::ssize(layout().units); ++unit) {
      const auto u = static_cast<size_t>(unit);
      kernels::split({.upper = reinterpret_cast<uint16_t*>(arena_.data() + plan_.memory.parameter_shard[u]),
                      .lower = reinterpret_cast<uint16_t*>(arena_.data() + plan_.memory.lower_half[u]),
                      .in = masters_in_fp32(unit),
                      .count = layout().units[u].shard_elements},
                     stream.get());
      zero_moments(unit, stream);
    }
  stream.synchronize();
}

void Trainer::fill_from_file(const cuda::Stream& stream) {
  const config::Config& config = plan_.config;
  const checkpoint::SafetensorsReader file(config.model.init);
  std::vector<float> values;
  for_each_piece(config.model, layout(), shard(), [&](const model::Parameter& p, uint64_t, auto& piece) {
    const checkpoint::TensorEntry& tensor = file.find(p.name);
    values.resize(static_cast<size_t>(piece.count));
    file.read(tensor, piece.tensor_offset, values);
    cuda::check(cudaMemcpyAsync(masters_in_fp32(p.unit) + piece.shard_offset, values.data(),
                                values.size() * sizeof(float), cudaMemcpyHostToDevice, stream.get()));
    stream.synchronize();  // before `values` is used again
    progress();
  });
}

DType Trainer::type_of(ShardKind kind) const {
  switch (kind) {
    case ShardKind::kMaster:
      return plan_.config.precision.param;
    case ShardKind::kMoment1:
    case ShardKind::kMoment2:
      return plan_.config.precision.moments;
    case ShardKind::kGradient:
      return DType::kFp32;
  }
  throw InternalError("type_of: unknown kind of shard " + std::to_string(static_cast<int>(kind)));
}

std::byte* Trainer::shard_address(ShardKind kind, int unit) const {
  const auto u = static_cast<size_t>(unit);
  const shard::MemoryPlan& memory = plan_.memory;
  switch (kind) {
    case ShardKind::kMaster:
      return arena_.data() + memory.parameter_shard[u];
    case ShardKind::kMoment1:
      return arena_.data() + memory.moment1[u];
    case ShardKind::kMoment2:
      return arena_.data() + memory.moment2[u];
    case ShardKind::kGradient:
      if (!plan_.policy.keep_gradients)
        throw InternalError("read_shard: gradients do not outlast their update without keep_gradients");
      return arena_.data() + memory.shard_slot[u];
  }
  throw InternalError("read_shard: unknown kind of shard " + std::to_string(static_cast<int>(kind)));
}

// Where initial values are written. Those that are going to be split are written to the place of the moments,
// before these are set to zero: it is as large or larger.
float* Trainer::masters_in_fp32(int unit) const {
  const bool halves = plan_.config.precision.param != DType::kFp32;
  return reinterpret_cast<float*>(shard_address(halves ? ShardKind::kMoment1 : ShardKind::kMaster, unit));
}

void Trainer::zero_moments(int unit, const cuda::Stream& stream) {
  for (const ShardKind kind : {ShardKind::kMoment1, ShardKind::kMoment2})
    cuda::check(cudaMemsetAsync(shard_address(kind, unit), 0,
                                static_cast<size_t>(layout().units[static_cast<size_t>(unit)].shard_elements *
                                                    size_of(type_of(kind))),
                                stream.get()));
}

void Trainer::enqueue(int64_t step) {
  program().begin_step(step);
  executor_->step();
}

std::vector<float> Trainer::read_shard(ShardKind kind, int unit) {
  std::vector<float> values(static_cast<size_t>(layout().units[static_cast<size_t>(unit)].shard_elements));
  read_shard(kind, unit, values);
  return values;
}

void Trainer::read_shard(ShardKind kind, int unit, std::span<float> values) {
  executor_->synchronize();
  const cuda::Stream stream;
  const auto copy = [&](std::span<std::byte> to, const std::byte* from) {
    cuda::check(cudaMemcpyAsync(to.data(), from, to.size(), cudaMemcpyDeviceToHost, stream.get()));
    stream.synchronize();
  };
  if (type_of(kind) == DType::kFp32) return copy(std::as_writable_bytes(values), shard_address(kind, unit));
  std::vector<uint16_t> upper(values.size()), lower(values.size());
  copy(std::as_writable_bytes(std::span(upper)), shard_address(kind, unit));
  if (kind == ShardKind::kMaster)
    copy(std::as_writable_bytes(std::span(lower)),
         arena_.data() + plan_.memory.lower_half[static_cast<size_t>(unit)]);
  std::ranges::transform(upper, lower, values.begin(), [](uint16_t high, uint16_t low) {
    return std::bit_cast<float>(join_float({high, low}));
  });
}

std::vector<const comm::Communicator*> Trainer::communicators() const {
  std::vector<const comm::Communicator*> all;
  for (const auto* communicator : {gather_.get(), reduce_.get(), replicate_.get()})
    if (communicator != nullptr) all.push_back(communicator);
  return all;
}

}  // namespace minillm::train
