#include "train/weights.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <system_error>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "model/parameters.h"

namespace minillm::train {
namespace {

std::unique_ptr<checkpoint::SafetensorsWriter> make_writer(const config::Config& config,
                                                           const std::string& path) {
  std::vector<checkpoint::TensorEntry> tensors;
  model::for_each_parameter(config.model, [&](const model::Parameter& p) {
    tensors.push_back({.name = p.name, .dtype = DType::kFp32, .shape = p.shape});
  });
  return std::make_unique<checkpoint::SafetensorsWriter>(
      path, std::move(tensors),
      std::map<std::string, std::string>{{"format", "pt"},
                                         {kModelKey, config::model_to_json(config.model)},
                                         {kSequenceKey, std::to_string(config.train.seq_len)},
                                         {kPrecisionKey, std::string(name_of(config.precision.param))}});
}

/// `shards`: of all ranks.
void write_unit(checkpoint::SafetensorsWriter& writer, const shard::UnitLayout& layout,
                std::span<const float> shards) {
  // Replicas have the same, and the first comes first.
  const auto model = shards.first(static_cast<size_t>(layout.padded_elements));
  for (const shard::Slice& slice : layout.slices)
    writer.write(std::as_bytes(std::span<const float>(shard::collect_slice(layout, slice, model))));
}

}  // namespace

std::string weights_path(const std::string& directory) {
  return (std::filesystem::path(directory) / "model.safetensors").string();
}

void prepare_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error)
    throw InputError(directory + ": cannot be created as a directory (" + error.message() +
                     "). Give a path that this user may write.");
  const std::filesystem::path probe = std::filesystem::path(directory) / ".minillm-write-test";
  std::ofstream file(probe);
  if (!file)
    throw InputError(directory +
                     ": files cannot be written there. Give a directory that this user may write.");
  file.close();
  std::filesystem::remove(probe, error);
}

void save_weights(Trainer& trainer, const config::Config& config, comm::Bootstrap& bootstrap,
                  const std::string& directory, const std::function<void()>& progress) {
  std::unique_ptr<checkpoint::SafetensorsWriter> writer;
  if (bootstrap.rank() == 0) writer = make_writer(config, weights_path(directory));
  std::vector<float> shards;
  for (size_t unit = 0; unit < trainer.layout().units.size(); ++unit) {
    const shard::UnitLayout& layout = trainer.layout().units[unit];
    const std::vector<float> shard = trainer.read_shard(ShardKind::kMaster, static_cast<int>(unit));
    if (writer) shards.resize(static_cast<size_t>(bootstrap.size() * layout.shard_elements));
    bootstrap.gather(std::as_bytes(std::span(shard)), std::as_writable_bytes(std::span(shards)));
    if (writer) write_unit(*writer, layout, shards);
    bootstrap.barrier();  // ranks that only wait see that rank 0 goes on
    progress();
  }
  if (writer) writer->finish();
  bootstrap.barrier();
}

}  // namespace minillm::train
