// Saving the weights of several ranks: the same file under every policy, through the memory of one unit.
#include <algorithm>
#include <exception>

#include "checkpoint/safetensors.h"
#include "support.h"
#include "tests/unit/temporary_folder.h"
#include "train/weights.h"

namespace minillm::testing {
namespace {

/// The ranks of this mpirun; counts what this one gathers.
class CountingBootstrap final : public comm::Bootstrap {
 public:
  int rank() const override { return world->rank(); }
  int size() const override { return world->size(); }
  int local_rank() const override { return world->local_rank(); }
  int local_size() const override { return world->local_size(); }
  void barrier() override { world->barrier(); }
  void broadcast(std::span<std::byte> bytes) override { world->broadcast(bytes); }
  int64_t max(int64_t value) override { return world->max(value); }
  [[noreturn]] void abort(int exit_code) override {
    world->abort(exit_code);
    std::terminate();  // not reached; g++ does not believe [[noreturn]] of a virtual function
  }
  void gather(const comm::Group& group, std::span<const std::byte> part, std::span<std::byte> all) override {
    ++gathers;
    largest = std::max(largest, std::ssize(all));
    world->gather(group, part, all);
  }

  int64_t gathers = 0;
  int64_t largest = 0;  ///< bytes
};

/// Saves after two steps with `shards` ranks to a model, and compares with what the ranks have.
void expect_saved(const std::string& policy, int shards) {
  config::Config config = smallest_config(DType::kFp32);
  config.parallel.policy = policy;
  if (policy == "hybrid") config.parallel.group_size = shards;
  config.train.micro_batch /= world->size();
  CountingBootstrap bootstrap;
  train::Trainer trainer(config, bootstrap);
  (void)train_losses(trainer, config, world->rank(), 2);
  const Tensors expected = gather_tensors(trainer, train::ShardKind::kMaster, *world);
  const test::TemporaryFolder folder;
  bootstrap.gathers = 0;
  bootstrap.largest = 0;
  int64_t progress = 0;
  train::save_weights(trainer, config, bootstrap, folder.path(""), [&] { ++progress; });

  const auto& units = trainer.layout().units;
  EXPECT_EQ(progress, std::ssize(units));
  EXPECT_EQ(bootstrap.gathers, world->rank() < shards ? std::ssize(units) : 0)
      << "other replicas have the same";
  if (world->rank() != 0) return;
  const auto bytes = [](const shard::UnitLayout& unit) {
    return unit.padded_elements * int64_t{sizeof(float)};
  };
  EXPECT_EQ(bootstrap.largest, bytes(*std::ranges::max_element(units, {}, bytes)));
  const checkpoint::SafetensorsReader reader(train::weights_path(folder.path("")));
  ASSERT_EQ(reader.tensors().size(), expected.size());
  for (const checkpoint::TensorEntry& entry : reader.tensors()) {
    std::vector<float> values(static_cast<size_t>(entry.elements()));
    reader.read(entry, 0, values);
    EXPECT_EQ(values, expected.at(entry.name)) << entry.name;
  }
}

TEST(Saving, GathersOneModelUnitByUnit) {
  expect_saved("full", world->size());
  expect_saved("replicate", 1);
  if (world->size() == 4) expect_saved("hybrid", 2);
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
