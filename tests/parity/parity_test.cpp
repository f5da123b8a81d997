// The same training in PyTorch and here: losses, every gradient, five AdamW steps. The golden files say how
// they were made (README.md beside them).
#include <filesystem>

#include "../distributed/support.h"
#include "checkpoint/safetensors.h"
#include "core/error.h"

namespace minillm::testing {
namespace {

constexpr int64_t kGlobalBatch = 12, kSequence = 12, kSteps = 5;

class Golden {
 public:
  explicit Golden(const std::string& name) : file_(std::string(MINILLM_GOLDEN_DIR) + "/" + name) {}

  std::vector<float> read(const std::string& name) const {
    const checkpoint::TensorEntry& tensor = file_.find(name);
    std::vector<float> values(static_cast<size_t>(tensor.elements()));
    file_.read(tensor, 0, values);
    return values;
  }

  config::Config config(DType dtype) const {
    config::Config config;
    config.model = config::model_from_json(file_.metadata().at("model"), file_.path());
    config.model.init = initial_weights();
    config.train.seq_len = kSequence;
    config.train.micro_batch = kGlobalBatch / world->size();
    config.train.head_chunk = 7;
    config.train.optimizer = optimizer();
    config.precision.param = dtype;
    return config;
  }

  /// Enqueues `step` on the batch `batch` of the file.
  void enqueue(train::Trainer& trainer, int64_t step, int64_t batch) const {
    const std::vector<float> tokens = read("tokens"), targets = read("targets");
    const size_t count = trainer.tokens(step).size();
    const size_t first =
        static_cast<size_t>(batch * kGlobalBatch * kSequence) + count * static_cast<size_t>(world->rank());
    for (size_t i = 0; i < count; ++i) {
      trainer.tokens(step)[i] = static_cast<int32_t>(tokens[first + i]);
      trainer.targets(step)[i] = static_cast<int32_t>(targets[first + i]);
    }
    trainer.enqueue(step);
  }

 private:
  config::Optimizer optimizer() const {
    // The optimizer's settings are in the file too: {"lr":…,"betas":[…],"eps":…,"weight_decay":…}.
    config::Optimizer optimizer;
    const std::string& text = file_.metadata().at("optimizer");
    const size_t at = text.find("\"lr\":");
    if (at == std::string::npos) throw InputError("golden file: no lr in " + text);
    optimizer.lr = std::stod(text.substr(at + 5));
    return optimizer;
  }

  /// The tensors init/NAME under their own names, as model.init wants them.
  std::string initial_weights() const {
    const auto stem = std::filesystem::path(file_.path()).stem().string();
    const std::string path = (std::filesystem::temp_directory_path() /
                              ("minillm-" + stem + "-" + std::to_string(world->size()) + ".safetensors"))
                                 .string();
    if (world->rank() == 0) {
      std::vector<checkpoint::TensorEntry> entries;
      for (const auto& tensor : file_.tensors())
        if (tensor.name.starts_with("init/"))
          entries.push_back({.name = tensor.name.substr(5), .dtype = DType::kFp32, .shape = tensor.shape});
      checkpoint::SafetensorsWriter writer(path, entries, {});
      for (const auto& entry : entries) {
        const std::vector<float> values = read("init/" + entry.name);
        writer.write(std::as_bytes(std::span(values)));
      }
      writer.finish();
    }
    world->barrier();
    return path;
  }

  checkpoint::SafetensorsReader file_;
};

/// Without RoPE the key part of the packed bias has a gradient of exactly zero (softmax ignores a constant
/// added to all scores of a query), so what is computed for it is rounding noise, which AdamW turns into
/// full-size updates.
std::vector<float> comparable(const config::Config& config, const std::string& name,
                              std::vector<float> values) {
  if (config.model.rope_theta == 0 && name.ends_with("in_proj_bias")) {
    const auto third = static_cast<std::ptrdiff_t>(values.size() / 3);
    values.erase(values.begin() + third, values.begin() + 2 * third);
  }
  return values;
}

class Parity : public ::testing::TestWithParam<const char*> {};

TEST_P(Parity, Fp32FollowsPyTorch) {
  const Golden golden(GetParam());
  const std::vector<float> losses = golden.read("losses");
  const config::Config config = golden.config(DType::kFp32);
  train::Trainer trainer(config, *world, keeping_gradients());
  golden.enqueue(trainer, 0, 0);
  EXPECT_NEAR(trainer.result(0).loss, losses[0], 1e-5);
  const Tensors gradients = gather_tensors(trainer, train::ShardKind::kGradient, *world);
  for (const auto& [name, values] : gradients)
    EXPECT_LT(relative_error(comparable(config, name, values),
                             comparable(config, name, golden.read("grad/" + name))),
              1e-5)
        << name;
  for (int64_t step = 1; step < kSteps; ++step) {
    golden.enqueue(trainer, step, step);
    EXPECT_NEAR(trainer.result(step).loss, losses[static_cast<size_t>(step)], 1e-4) << "step " << step;
  }
  const Tensors parameters = gather_tensors(trainer, train::ShardKind::kMaster, *world);
  for (const auto& [name, values] : parameters)
    EXPECT_LT(relative_error(comparable(config, name, values),
                             comparable(config, name, golden.read("after/" + name))),
              1e-4)
        << name;
  golden.enqueue(trainer, kSteps, 0);
  EXPECT_NEAR(trainer.result(kSteps).loss, losses[kSteps], 1e-4);
}

TEST_P(Parity, Bf16IsNoWorseThanPyTorchsBf16) {
  const Golden golden(GetParam());
  const std::vector<float> losses = golden.read("losses"), peer = golden.read("bf16_losses");
  const config::Config config = golden.config(DType::kBf16);
  train::Trainer trainer(config, *world, keeping_gradients());
  golden.enqueue(trainer, 0, 0);
  double error = 0, peer_error = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step > 0) golden.enqueue(trainer, step, step);
    const auto s = static_cast<size_t>(step);
    error += std::pow(trainer.result(step).loss - losses[s], 2);
    peer_error += std::pow(static_cast<double>(peer[s]) - losses[s], 2);
    if (step > 0) continue;
    for (const auto& [name, values] : gather_tensors(trainer, train::ShardKind::kGradient, *world)) {
      const double ours = relative_error(comparable(config, name, values),
                                         comparable(config, name, golden.read("grad/" + name)));
      EXPECT_LT(ours, 1.5 * golden.read("bf16_grad_error/" + name)[0]) << name;
    }
  }
  EXPECT_LT(std::sqrt(error), 1.5 * std::sqrt(peer_error));
}

INSTANTIATE_TEST_SUITE_P(Models, Parity, ::testing::Values("reference.safetensors", "llama.safetensors"));

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
