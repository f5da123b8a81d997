#include "train/trainer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "checkpoint/safetensors.h"
#include "comm/watchdog.h"
#include "core/checked.h"
#include "cuda/check.h"
#include "kernels/cast.h"
#include "kernels/initialize.h"
#include "model/parameters.h"
#include "shard/builder.h"
#include "train/gemm_choices.h"

namespace minillm::train {
namespace {

shard::Policy policy(const config::Config& config) {
  return {.weight_slots = narrow<int>(config.parallel.weight_slots),
          .gradient_slots = narrow<int>(config.parallel.gradient_slots)};
}

int64_t planned_bytes(const config::Config& config, const shard::Layout& layout) {
  const TrainingProgram program(config, layout);
  const shard::Schedule schedule = shard::build_schedule(layout, program, policy(config));
  return shard::plan_memory(schedule, layout, program, config.precision.param, config.precision.moments)
      .bytes;
}

/// The largest micro-batch whose plan fits `capacity`, 0 if none does: plans grow with the batch.
int64_t largest_micro_batch(config::Config config, const shard::Layout& layout, int64_t capacity) {
  int64_t fits = 0, too_large = config.train.micro_batch;
  while (too_large - fits > 1) {
    const int64_t middle = (fits + too_large) / 2;
    config.train.micro_batch = middle;
    (planned_bytes(with_head_chunk(config, layout), layout) <= capacity ? fits : too_large) = middle;
  }
  return fits;
}

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

// The product that accumulates the head's gradient reads and writes the whole of it for every chunk, so few
// are better; and where blocks need more than the head, rows of logits cost nothing.
config::Config with_head_chunk(config::Config config, const shard::Layout& layout) {
  constexpr int64_t kLeast = 1024, kMultiple = 128;
  if (config.train.head_chunk > 0) return config;
  const int64_t rows = config.train.micro_batch * config.train.seq_len;
  config.train.head_chunk = std::min(rows, kLeast);
  const int64_t bytes = planned_bytes(config, layout);
  config::Config larger = config;
  for (int64_t chunks = 1; chunks * kLeast < rows; ++chunks) {
    larger.train.head_chunk = round_up(ceil_div(rows, chunks), kMultiple);
    if (planned_bytes(larger, layout) <= bytes) return larger;
  }
  return config;
}

Trainer::Trainer(const config::Config& config, comm::Bootstrap& bootstrap, const WaitEdit& edit_waits)
    : rank_(bootstrap.rank()),
      layout_(shard::make_layout(model::units(config.model), bootstrap.size())),
      program_(with_head_chunk(config, layout_), layout_, rank_),
      schedule_(shard::build_schedule(layout_, program_, policy(config))),
      plan_(
          shard::plan_memory(schedule_, layout_, program_, config.precision.param, config.precision.moments)),
      moment_type_(config.precision.moments) {
  check_capacity(config);
  arena_ = cuda::DeviceMemory(plan_.bytes);
  if (bootstrap.size() > 1) {
    gather_ = std::make_unique<comm::Communicator>(bootstrap, "gather");
    reduce_ = std::make_unique<comm::Communicator>(bootstrap, "reduce");
  }
  std::vector<std::vector<shard::Wait>> waits = shard::derive_waits(schedule_);
  if (edit_waits) edit_waits(schedule_, waits);
  executor_ = std::make_unique<shard::Executor>(schedule_, layout_, plan_, std::move(waits), program_,
                                                shard::Communicators{gather_.get(), reduce_.get()},
                                                arena_.data(), config.precision.param);
  if (!config.gemm.deterministic) choose_algorithms(config, bootstrap);
  fill_initial_values(config);
}

Trainer::~Trainer() {
  // Members die in an order that suits their owners, not the device: let it finish first.
  (void)cudaDeviceSynchronize();
}

void Trainer::check_capacity(const config::Config& config) const {
  const cuda::DeviceCapacity capacity = cuda::device_capacity();
  if (plan_.bytes <= capacity.free) return;
  const int64_t fits = largest_micro_batch(config, layout_, capacity.free);
  const std::string advice =
      fits > 0
          ? "The largest train.micro_batch that fits is " + std::to_string(fits) + "."
          : "Not even train.micro_batch 1 fits: use more ranks, a shorter train.seq_len or a smaller model.";
  throw MemoryError("the plan needs " + std::to_string(plan_.bytes) + " bytes on each device, but only " +
                    std::to_string(capacity.free) + " of " + std::to_string(capacity.total) + " are free.\n" +
                    plan_.table() + advice);
}

// A whole step on zeros, before there is anything to lose: it visits every product in its place, with the
// alignments that it will have. Then the arena is scratch memory for timing.
void Trainer::choose_algorithms(const config::Config& config, comm::Bootstrap& bootstrap) {
  const cuda::Stream stream;
  cuda::check(cudaMemsetAsync(arena_.data(), 0, static_cast<size_t>(arena_.bytes()), stream.get()));
  stream.synchronize();
  {
    const comm::Watchdog watchdog(bootstrap, communicators(),
                                  std::chrono::seconds(static_cast<int64_t>(config.parallel.timeout_s)));
    enqueue(0);
    executor_->synchronize();
  }
  choose_gemms(program_.blas(), config.gemm, bootstrap,
               std::span(arena_.data(), static_cast<size_t>(arena_.bytes())), stream.get());
}

// All on one stream: default-stream copies and sets are not ordered with the non-blocking streams that
// kernels run on.
void Trainer::fill_initial_values(const config::Config& config) {
  const cuda::Stream stream;
  // Moments start at zero and so does padding; all else in the arena is written before it is read.
  for (size_t unit = 0; unit < layout_.units.size(); ++unit)
    for (ShardKind kind : {ShardKind::kMaster, ShardKind::kMoment1, ShardKind::kMoment2})
      cuda::check(cudaMemsetAsync(
          shard_address(kind, static_cast<int>(unit)), 0,
          static_cast<size_t>(layout_.units[unit].shard_elements * size_of(type_of(kind))), stream.get()));
  const int rope = program_.transformer().rope_table();
  if (rope >= 0) {
    const std::vector<float2> table = program_.transformer().rope_table_values();
    cuda::check(cudaMemcpyAsync(arena_.data() + plan_.buffer[static_cast<size_t>(rope)], table.data(),
                                table.size() * sizeof(float2), cudaMemcpyHostToDevice, stream.get()));
  }
  if (config.model.init == "pytorch") {
    for_each_piece(config.model, layout_, rank_,
                   [&](const model::Parameter& p, uint64_t number, auto& piece) {
                     kernels::initialize({.out = master(p.unit) + piece.shard_offset,
                                          .first = piece.tensor_offset,
                                          .count = piece.count,
                                          .distribution = p.distribution,
                                          .a = p.a,
                                          .seed = static_cast<uint64_t>(config.train.seed),
                                          .stream = number},
                                         stream.get());
                   });
  } else {
    fill_from_file(config, stream);
  }
  if (config.precision.param != DType::kFp32)
    for (size_t unit = 0; unit < layout_.units.size(); ++unit)
      kernels::cast({.out = arena_.data() + plan_.parameter_shard[unit],
                     .in = arena_.data() + plan_.master[unit],
                     .count = layout_.units[unit].shard_elements,
                     .out_type = config.precision.param,
                     .in_type = DType::kFp32},
                    stream.get());
  stream.synchronize();
}

void Trainer::fill_from_file(const config::Config& config, const cuda::Stream& stream) {
  const checkpoint::SafetensorsReader file(config.model.init);
  std::vector<float> values;
  for_each_piece(config.model, layout_, rank_, [&](const model::Parameter& p, uint64_t, auto& piece) {
    const checkpoint::TensorEntry& tensor = file.find(p.name);
    if (tensor.shape != p.shape)
      throw InputError(config.model.init + ": tensor " + p.name +
                       " has another shape than the model of the configuration");
    values.resize(static_cast<size_t>(piece.count));
    file.read(tensor, piece.tensor_offset, values);
    cuda::check(cudaMemcpyAsync(master(p.unit) + piece.shard_offset, values.data(),
                                values.size() * sizeof(float), cudaMemcpyHostToDevice, stream.get()));
    stream.synchronize();  // before `values` is used again
  });
}

DType Trainer::type_of(ShardKind kind) const {
  return kind == ShardKind::kMoment1 || kind == ShardKind::kMoment2 ? moment_type_ : DType::kFp32;
}

std::byte* Trainer::shard_address(ShardKind kind, int unit) const {
  const auto u = static_cast<size_t>(unit);
  const int64_t offset = kind == ShardKind::kMaster     ? plan_.master[u]
                         : kind == ShardKind::kGradient ? plan_.gradient_shard[u]
                         : kind == ShardKind::kMoment1  ? plan_.moment1[u]
                                                        : plan_.moment2[u];
  return arena_.data() + offset;
}

float* Trainer::master(int unit) const {
  return reinterpret_cast<float*>(shard_address(ShardKind::kMaster, unit));
}

void Trainer::enqueue(int64_t step) {
  program_.begin_step(step);
  executor_->step();
}

std::vector<float> Trainer::read_shard(ShardKind kind, int unit) {
  executor_->synchronize();
  const cuda::Stream stream;
  const auto count = static_cast<size_t>(layout_.units[static_cast<size_t>(unit)].shard_elements);
  std::vector<float> values(count);
  std::vector<uint16_t> halves(type_of(kind) == DType::kBf16 ? count : 0);
  void* const target = halves.empty() ? static_cast<void*>(values.data()) : halves.data();
  cuda::check(cudaMemcpyAsync(target, shard_address(kind, unit),
                              count * static_cast<size_t>(size_of(type_of(kind))), cudaMemcpyDeviceToHost,
                              stream.get()));
  stream.synchronize();
  if (!halves.empty())
    std::ranges::transform(halves, values.begin(),
                           [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); });
  return values;
}

std::vector<const comm::Communicator*> Trainer::communicators() const {
  if (!gather_) return {};
  return {gather_.get(), reduce_.get()};
}

}  // namespace minillm::train
