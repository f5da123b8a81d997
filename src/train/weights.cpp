#include "train/weights.h"

#include <cmath>
#include <filesystem>
#include <iostream>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "comm/group.h"
#include "core/checked.h"
#include "core/error.h"
#include "core/output_file.h"
#include "model/parameters.h"

namespace minillm::train {
namespace {

checkpoint::SafetensorsFile file_of(const config::Config& config) {
  std::vector<checkpoint::TensorEntry> tensors;
  model::for_each_parameter(config.model, [&](const model::Parameter& p) {
    tensors.push_back({.name = p.name, .dtype = DType::kFp32, .shape = p.shape});
  });
  return {std::move(tensors),
          {{"format", "pt"},
           {kModelKey, config::model_to_json(config.model)},
           {kSequenceKey, std::to_string(config.train.seq_len)},
           {kPrecisionKey, std::string(name_of(config.precision.param))}}};
}

bool all_finite(std::span<const float> values) {
  bool finite = true;  // all are looked at, which compilers make fast
  for (const float value : values) finite &= std::isfinite(value);
  return finite;
}

/// `shards`: of all ranks that share a model. A tensor's pieces follow each other in their order.
void write_unit(checkpoint::SafetensorsWriter& writer, const shard::UnitLayout& unit,
                std::span<const float> shards, const std::string& path) {
  const auto ranks = static_cast<int>(div_exact(std::ssize(shards), unit.shard_elements));
  for (const shard::Slice& slice : unit.slices)
    for (int rank = 0; rank < ranks; ++rank) {
      const shard::ShardPiece piece = shard::shard_piece(unit, slice, rank);
      const auto values = shards.subspan(static_cast<size_t>(rank * unit.shard_elements + piece.shard_offset),
                                         static_cast<size_t>(piece.count));
      if (!all_finite(values))
        throw Error(ExitCode::kNumerics,
                    path + ": is not written, because not all values of " + slice.name +
                        " are finite after the last step. Lower train.optimizer.lr or set train.grad_clip");
      writer.write(std::as_bytes(values));
    }
}

}  // namespace

std::string weights_path(const std::string& directory) {
  return (std::filesystem::path(directory) / "model.safetensors").string();
}

std::unique_ptr<FileLock> reserve_weights(const config::Config& config, const comm::Bootstrap& bootstrap) {
  if (config.checkpoint.dir.empty() || bootstrap.rank() != 0) return nullptr;
  make_folder(config.checkpoint.dir);
  const std::string path = weights_path(config.checkpoint.dir);
  auto lock = std::make_unique<FileLock>(path);
  if (lock->weakness().empty())
    remove_leftovers(path);
  else
    std::cout << lock->weakness() << std::endl;
  require_writable(path, file_of(config).bytes());
  return lock;
}

void save_weights(Trainer& trainer, const config::Config& config, comm::Bootstrap& bootstrap,
                  const std::string& directory, const std::function<void()>& progress) {
  const std::string path = weights_path(directory);
  std::optional<checkpoint::SafetensorsWriter> writer;
  if (bootstrap.rank() == 0) writer.emplace(path, file_of(config));
  // Replicas have the same.
  const comm::Group model = comm::shard_group(0, bootstrap.size(), trainer.plan().division.shards);
  const bool takes_part = model.position_of(bootstrap.rank()) >= 0;
  for (size_t number = 0; number < trainer.layout().units.size(); ++number) {
    const shard::UnitLayout& unit = trainer.layout().units[number];
    std::vector<float> values;
    if (takes_part) {
      values.resize(static_cast<size_t>(writer ? unit.padded_elements : unit.shard_elements));
      const auto own = std::span(values).first(static_cast<size_t>(unit.shard_elements));
      trainer.read_shard(ShardKind::kMaster, static_cast<int>(number), own);
      bootstrap.gather(model, std::as_bytes(own), std::as_writable_bytes(std::span(values)));
    }
    if (writer) write_unit(*writer, unit, values, path);
    bootstrap.barrier();  // ranks that only wait see that rank 0 goes on
    progress();
  }
  if (writer) writer->finish();
  bootstrap.barrier();
}

}  // namespace minillm::train
