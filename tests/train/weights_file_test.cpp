// What a weights file has to be before anything is made of it.
#include "train/weights_file.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/error.h"
#include "model/parameters.h"
#include "tests/unit/errors.h"
#include "tests/unit/temporary_folder.h"
#include "train/weights.h"

namespace minillm::train {
namespace {

using minillm::test::expect_error;
using minillm::test::TemporaryFolder;

class WeightsFile : public ::testing::Test {
 protected:
  WeightsFile() {
    model_ =
        config::parse("{}", "", {"model.vocab_size=8", "model.dim=8", "model.n_layers=1", "model.n_heads=1"})
            .model;
    metadata_ = {{kModelKey, config::model_to_json(model_)}, {kSequenceKey, "4"}, {kPrecisionKey, "fp32"}};
    model::for_each_parameter(model_, [&](const model::Parameter& p) { shapes_[p.name] = p.shape; });
  }

  /// The file as it stands, read.
  TrainedModel read() const {
    std::vector<checkpoint::TensorEntry> tensors;
    int64_t bytes = 0;
    for (const auto& [name, shape] : shapes_) {
      tensors.push_back({.name = name, .dtype = DType::kBf16, .shape = shape});
      bytes += tensors.back().elements() * size_of(DType::kBf16);
    }
    const std::string path = folder_.path("model.safetensors");
    checkpoint::SafetensorsWriter writer(path, tensors, metadata_);
    writer.write(std::vector<std::byte>(static_cast<size_t>(bytes)));
    writer.finish();
    return trained_model(checkpoint::SafetensorsReader(path));
  }
  void expect_refused(std::initializer_list<std::string> parts) const {
    expect_error<InputError>([&] { (void)read(); }, {"model.safetensors"});
    expect_error<InputError>([&] { (void)read(); }, parts);
  }

  TemporaryFolder folder_;
  config::Model model_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::vector<int64_t>> shapes_;
};

TEST_F(WeightsFile, TellsWhatItIs) {
  shapes_["unknown"] = {3};  // does not matter
  const TrainedModel trained = read();
  EXPECT_EQ(trained.model.dim, 8);
  EXPECT_EQ(trained.sequence, 4);
  EXPECT_EQ(trained.precision, DType::kFp32);
}

TEST_F(WeightsFile, ShapesAreTheModels) {
  shapes_["layers.0.ffn.up.weight"] = {8, 32};
  expect_refused({"'layers.0.ffn.up.weight'", "[8, 32]", "[32, 8]"});
  shapes_["layers.0.ffn.up.weight"] = {32, 8};
  shapes_["head.weight"] = {16, 8};
  expect_refused({"'head.weight'", "[16, 8]", "[8, 8]"});
  shapes_["head.weight"] = {64};
  expect_refused({"'head.weight'", "[64]", "[8, 8]"});
  shapes_.erase("head.weight");
  expect_refused({"no tensor 'head.weight'"});
}

TEST_F(WeightsFile, MetadataIsCheckedLikeAConfiguration) {
  for (const char* length :
       {"abc", "", "-5", "0", "4000000000", "99999999999999999999", "4 ", "0x4", "4.0"}) {
    metadata_[kSequenceKey] = length;
    expect_refused({kSequenceKey, std::string("\"") + length + "\"", "from 1 to 16777216"});
  }
  metadata_[kSequenceKey] = "4";
  metadata_[kPrecisionKey] = "fp64";
  expect_refused({kPrecisionKey, "\"fp64\"", "\"bf16\" or \"fp32\""});
  metadata_[kPrecisionKey] = "bf16";
  for (const char* model :
       {"", "[]", "{", R"({"dim": 7})", R"({"dim": "8"})", R"({"depth": 1})", R"({"n_layers": -1})"}) {
    metadata_[kModelKey] = model;
    expect_refused({kModelKey});
  }
  metadata_.erase(kModelKey);
  expect_refused({kModelKey, "not written by minillm train"});
}

}  // namespace
}  // namespace minillm::train
