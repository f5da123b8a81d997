#include "config/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <map>
#include <string>
#include <vector>

#include "config/schema.h"
#include "core/error.h"
#include "errors.h"
#include "temporary_folder.h"

namespace minillm::config {
namespace {

using test::expect_error;

Config with(const std::string& override) {
  return parse("{}", "c.json", {override});
}

void expect_rejected(const std::string& text, std::initializer_list<std::string> parts) {
  SCOPED_TRACE(text);
  expect_error<UsageError>([&] { parse(text, "c.json", {}); }, parts);
}

void expect_override_rejected(const std::string& override, std::initializer_list<std::string> parts) {
  SCOPED_TRACE(override);
  expect_error<UsageError>([&] { with(override); }, parts);
}

TEST(Config, EmptyObjectIsTheReference) {
  const Config config = parse("{}", "c.json", {});
  EXPECT_EQ(config.model.vocab_size, 32000);
  EXPECT_EQ(config.model.ffn_dim, 8192);  // 4 * dim
  EXPECT_EQ(config.precision.param, DType::kBf16);
  EXPECT_TRUE(config.gemm.deterministic);  // equal runs, equal bits
  EXPECT_EQ(config.gemm.cache, "");
  EXPECT_EQ(config.gemm.sm_limit, 0);
}

TEST(Config, ReferenceFileIsTheDefaultsWithEveryKey) {
  const Config config = load(MINILLM_SOURCE_DIR "/configs/minillm.json", {});
  EXPECT_EQ(to_json(config), to_json(parse("{}", "c.json", {})));

  std::ifstream file(MINILLM_SOURCE_DIR "/configs/minillm.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for_each_key(Config{}, [&](std::string_view path, auto&&...) {
    const std::string key = '"' + std::string(path.substr(path.rfind('.') + 1)) + "\": ";
    EXPECT_NE(text.find(key), std::string::npos) << path;
  });
}

TEST(Config, QuickstartFileIsValid) {
  const Config config = load(MINILLM_SOURCE_DIR "/configs/quickstart.json", {"train.steps=7"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.data.source, "text");
  EXPECT_TRUE(config.model.causal);
}

TEST(Config, EveryKeySurvivesPrintingAndParsing) {
  Config config;
  // A value other than the default for every key, so that a key that is dropped or swapped shows.
  int64_t number = 3;
  for_each_key(config, [&]<typename T>(std::string_view path, T& member, auto&&...) {
    if constexpr (std::is_same_v<T, int64_t>) member = ++number;
    if constexpr (std::is_same_v<T, double>)
      member = 1.0 / static_cast<double>(++number) + (path.ends_with("_s") ? 1 : 0);
    if constexpr (std::is_same_v<T, bool>) member = !member;
    if constexpr (std::is_same_v<T, std::string>) member = "folder \"é\"/" + std::string(path);
    if constexpr (std::is_same_v<T, DType>) member = path == "precision.reduce" ? DType::kBf16 : DType::kFp32;
    if constexpr (std::is_same_v<T, std::vector<Recompute>>) {
      member.assign(static_cast<size_t>(config.model.n_layers), Recompute::kBlock);
      member.front() = Recompute::kNone;
    }
  });
  config.parallel.policy = "hybrid";
  config.parallel.hardware = "";  // only with another policy
  config.model.dim = 48 * config.model.n_heads;
  config.model.init = "weights.safetensors";
  config.data.source = "text";

  const Config again = parse(to_json(config), "c.json", {});
  EXPECT_EQ(to_json(again), to_json(config));
  EXPECT_EQ(again.train.optimizer.beta2, config.train.optimizer.beta2);
  EXPECT_EQ(again.model.init, "weights.safetensors");
  EXPECT_EQ(again.precision.param, DType::kFp32);
  EXPECT_TRUE(again.model.causal);
  EXPECT_FALSE(again.gemm.deterministic);
  EXPECT_EQ(again.gemm.cache, config.gemm.cache);
  EXPECT_EQ(again.precision.reduce, DType::kBf16);
  EXPECT_EQ(again.memory.recompute, config.memory.recompute);
  EXPECT_EQ(again.memory.recompute_of(0), Recompute::kNone);
  EXPECT_EQ(again.memory.recompute_of(1), Recompute::kBlock);

  const std::string model = model_to_json(config.model);
  EXPECT_EQ(model.find('\n'), std::string::npos);
  EXPECT_EQ(model_to_json(model_from_json(model, "w.safetensors")), model);
  EXPECT_EQ(model_from_json(model, "w.safetensors").n_heads, config.model.n_heads);
}

TEST(Config, DescriptionListsEveryKey) {
  const std::string text = "\n" + describe();
  int keys = 0;
  for_each_key(Config{},
               [&](const std::string& path, const auto&, const auto& allowed, const std::string& meaning) {
                 ++keys;
                 const size_t at = text.find("\n" + path + " (default ");
                 ASSERT_NE(at, std::string::npos) << path;
                 EXPECT_NE(text.find(meaning, at), std::string::npos) << path;
                 EXPECT_NE(text.find(allowed.wanted(), at), std::string::npos) << path;
               });
  EXPECT_EQ(keys, 48);
}

TEST(Config, KeysThatMayDifferByRankAreToldWithTheKey) {
  std::vector<std::string> found;
  for (const KeyValue& key : key_values(Config{}))
    if (key.by_rank) found.push_back(key.key);
  EXPECT_EQ(found, (std::vector<std::string>{"model.init", "parallel.hardware", "gemm.cache", "data.path",
                                             "checkpoint.dir"}));
  const std::string text = describe();
  for (const std::string& key : found) {
    const size_t at = text.find(key + " (default ");
    EXPECT_LT(text.find("; may differ by rank\n", at), text.find(" (default ", at + key.size() + 1)) << key;
  }
}

TEST(Config, KeyValuesAreWhatTheFileWouldSay) {
  Config config;
  config.precision.param = DType::kFp32;
  config.memory.recompute = {Recompute::kNone, Recompute::kBlock};
  config.data.path = "a \"b\"";
  std::map<std::string, std::string> values;
  for (const KeyValue& key : key_values(config)) values[key.key] = key.value;
  EXPECT_EQ(values.at("train.optimizer.lr"), "0.0003");
  EXPECT_EQ(values.at("precision.param"), "\"fp32\"");
  EXPECT_EQ(values.at("memory.recompute"), "[\"none\",\"block\"]");
  EXPECT_EQ(values.at("data.path"), "\"a \\\"b\\\"\"");
}

TEST(Config, UnknownKeysNameTheNearest) {
  expect_rejected(R"({"train": {"stps": 5}})", {"c.json", "'train.stps'", "'train.steps'"});
  expect_rejected(R"({"train": {"optimizer": {"beta_1": 0}}})",
                  {"'train.optimizer.beta_1'", "'train.optimizer.beta1'"});
  expect_rejected(R"({"model": {"seq_len": 5}})", {"'model.seq_len'", "'train.seq_len'"});
  expect_rejected(R"({"lr": 5})", {"'lr'", "'train.optimizer.lr'"});
  expect_rejected(R"({"optimizer": {"lr": 5}})", {"'optimizer'"});
  expect_rejected(R"({"": 5})", {"unknown key ''"});
  expect_rejected(R"({"train.steps": 5})", {"'train.steps'", "nested objects"});
  expect_override_rejected("train.steps.x=5", {"--set train.steps.x=5", "'train.steps'"});
}

TEST(Config, IllTypedValuesNameKeyValueAndType) {
  expect_rejected(R"({"train": {"steps": "many"}})",
                  {"c.json", "'train.steps'", "\"many\" (a string)", "an integer from 1"});
  expect_rejected(R"({"train": {"steps": 2.5}})", {"'train.steps'", "2.5 (a number)", "an integer"});
  expect_rejected(R"({"train": {"steps": null}})", {"'train.steps'", "null"});
  expect_rejected(R"({"train": {"steps": {}}})", {"'train.steps'", "an object"});
  expect_rejected(R"({"train": 5})", {"'train'", "5 (an integer)", "an object", "'train.steps'"});
  expect_rejected(R"({"model": {"causal": 1}})", {"'model.causal'", "1 (an integer)", "true or false"});
  expect_rejected(R"({"train": {"grad_clip": true}})", {"'train.grad_clip'", "true (a boolean)", "a number"});
  expect_rejected(R"({"precision": {"param": "fp16"}})",
                  {"'precision.param'", "\"fp16\"", "\"bf16\" or \"fp32\""});
  expect_rejected(R"({"checkpoint": {"dir": 3}})", {"'checkpoint.dir'", "3 (an integer)", "a string"});
  expect_rejected("[1]", {"c.json", "an array", "wanted an object"});
}

TEST(Config, RangesAreCheckedNextToTheKey) {
  for (const char* key : {"model.vocab_size", "model.n_layers", "model.n_heads", "train.steps",
                          "train.micro_batch", "train.seq_len", "train.grad_accumulation"}) {
    expect_override_rejected(std::string(key) + "=0", {key, "0 (an integer)", "from 1 to"});
    expect_override_rejected(std::string(key) + "=-3", {key, "-3 (an integer)"});
    expect_override_rejected(std::string(key) + "=99999999999999999999", {key, "99999999999999999999"});
  }
  expect_override_rejected("train.seed=9223372036854775808", {"train.seed", "9223372036854775808"});
  EXPECT_EQ(with("train.seed=9223372036854775807").train.seed, std::numeric_limits<int64_t>::max());
  expect_override_rejected("parallel.weight_slots=1", {"parallel.weight_slots (1)", "2 or more"});
  for (const char* key : {"train.optimizer.beta1", "train.optimizer.beta2"}) {
    expect_override_rejected(std::string(key) + "=1", {key, "below 1"});
    expect_override_rejected(std::string(key) + "=-0.1", {key, "at least 0"});
  }
  EXPECT_EQ(with("train.optimizer.beta1=0").train.optimizer.beta1, 0);
  expect_override_rejected("train.optimizer.lr=-1e-4", {"train.optimizer.lr", "-0.0001", "at least 0"});
  expect_override_rejected("train.optimizer.lr=1e300", {"train.optimizer.lr", "1e+300"});
  expect_override_rejected("train.optimizer.lr=NaN",
                           {"train.optimizer.lr", "\"NaN\" (a string)", "a number"});
  expect_override_rejected("train.optimizer.eps=0", {"train.optimizer.eps", "1e-30"});
  expect_override_rejected("model.norm_eps=0", {"model.norm_eps", "1e-30"});
  expect_override_rejected("parallel.timeout_s=0", {"parallel.timeout_s", "at least 1"});
  expect_override_rejected("gemm.sm_limit=-1", {"gemm.sm_limit", "-1 (an integer)", "from 0 to"});
  expect_override_rejected("data.source=web", {"data.source", "\"web\"", "\"random\" or \"text\""});
  expect_override_rejected("model.init=zeros", {"model.init", "\"zeros\"", "\"pytorch\"", ".safetensors"});
}

TEST(Config, RulesBetweenKeysNameAllOfThem) {
  expect_override_rejected("model.n_heads=12",
                           {"c.json", "model.dim (2048)", "model.n_heads (12)", "multiple"});
  expect_override_rejected("model.n_heads=8", {"2048", "8", "= 256", "multiple of 8, at most 128"});
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json", {"model.dim=20", "model.n_heads=2"});
      },
      {"model.dim (20)", "= 10", "multiple of 8"});
  expect_override_rejected("data.source=text", {"data.path", "empty"});
  expect_override_rejected("gemm.cache=choices.json",
                           {"gemm.cache (\"choices.json\")", "gemm.deterministic (true)", "=false"});
  EXPECT_EQ(parse("{}", "c.json", {"gemm.cache=choices.json", "gemm.deterministic=false"}).gemm.cache,
            "choices.json");
  EXPECT_FALSE(with("gemm.deterministic=false").gemm.deterministic);
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json", {"train.micro_batch=65536", "train.seq_len=32768"});
      },
      {"train.micro_batch (65536)", "train.seq_len (32768)", "2147483648"});
  EXPECT_NO_THROW(parse("{}", "c.json", {"train.micro_batch=65535", "train.seq_len=32768"}));
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json", {"model.n_layers=1024", "train.grad_accumulation=33"});
      },
      {"model.n_layers (1024)", "train.grad_accumulation (33)", "33792", "32768"});
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json", {"train.micro_batch=65536", "train.seq_len=1024", "train.head_chunk=16"});
      },
      {"train.head_chunk (16)", "4194304 chunks", "67108864 tokens", "2097152"});
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json",
              {"model.dim=1048576", "model.n_heads=8192", "model.n_layers=1024", "train.micro_batch=100000"});
      },
      {"activations", "bytes", "2^62", "train.micro_batch (100000)"});
  expect_error<UsageError>(
      [] {
        parse("{}", "c.json",
              {"model.dim=1048576", "model.n_heads=8192", "train.micro_batch=1", "train.seq_len=16777216"});
      },
      {"operations", "2^62", "train.seq_len (16777216)"});
}

TEST(Config, IntegersMayBeWrittenAsIntegralNumbers) {
  EXPECT_EQ(with("train.steps=20.0").train.steps, 20);
  EXPECT_EQ(with("train.steps=1e3").train.steps, 1000);
  EXPECT_EQ(with("train.optimizer.lr=1").train.optimizer.lr, 1.0);
}

TEST(Config, OverridesApplyInOrderAndReplaceWrongValues) {
  EXPECT_EQ(parse(R"({"train": {"steps": -1}})", "c.json", {"train.steps=5", "train.steps=6"}).train.steps,
            6);
  EXPECT_EQ(with("checkpoint.dir=runs/a b=c").checkpoint.dir, "runs/a b=c");
  EXPECT_EQ(with("checkpoint.dir=\"3\"").checkpoint.dir, "3");
  EXPECT_EQ(with("checkpoint.dir=").checkpoint.dir, "");
  expect_override_rejected("checkpoint.dir=3", {"checkpoint.dir", "3 (an integer)"});
}

TEST(Config, PoliciesRejectWhatTheyWouldIgnore) {
  const auto rejected = [](std::vector<std::string> overrides, std::initializer_list<std::string> parts) {
    SCOPED_TRACE(overrides.back());
    expect_error<UsageError>([&] { parse("{}", "c.json", overrides); }, parts);
  };
  rejected({"parallel.policy=zero"}, {"parallel.policy", "\"zero\"", "\"full\", \"grads\""});
  rejected({"parallel.group_size=2"}, {"parallel.group_size (2)", "parallel.policy (\"full\")"});
  for (const char* policy : {"grads", "replicate", "auto"})
    rejected({std::string("parallel.policy=") + policy, "parallel.weight_slots=3"},
             {"parallel.weight_slots (3)", std::string("parallel.policy (\"") + policy});
  rejected({"parallel.policy=auto", "parallel.gradient_slots=3"},
           {"parallel.gradient_slots (3)", "parallel.policy (\"auto\")"});
  rejected({"parallel.hardware=h100"}, {"parallel.hardware (\"h100\")", "parallel.policy (\"full\")"});
  rejected({"parallel.policy=replicate", "precision.reduce=bf16"},
           {"precision.reduce (\"bf16\")", "parallel.policy (\"replicate\")"});
  rejected({"parallel.reduce_every_micro_batch=false"},
           {"parallel.reduce_every_micro_batch (false)", "train.grad_accumulation (1)"});
  rejected({"parallel.policy=auto", "memory.recompute=block"},
           {"memory.recompute", "parallel.policy (\"auto\")"});
  rejected({"memory.recompute=[\"cheap\",\"block\"]"}, {"memory.recompute lists 2", "model.n_layers (12)"});
  rejected({"memory.recompute=[]"}, {"memory.recompute", "one per block"});
  rejected({"memory.recompute=[\"cheap\",3]"}, {"memory.recompute", "one per block"});
  rejected({"memory.recompute=some"}, {"memory.recompute", "\"some\"", "\"cheap\", \"block\""});

  EXPECT_EQ(with("memory.recompute=none").memory.recompute_of(7), Recompute::kNone);
  EXPECT_EQ(parse("{}", "c.json", {"parallel.policy=hybrid", "parallel.group_size=4"}).parallel.group_size,
            4);
  EXPECT_EQ(parse("{}", "c.json", {"parallel.policy=auto", "parallel.hardware=h100"}).parallel.hardware,
            "h100");
  EXPECT_EQ(with("memory.limit=40e9").memory.limit, 40'000'000'000);
  EXPECT_EQ(with("memory.reserve=2e9").memory.reserve, 2'000'000'000);
  rejected({"memory.reserve=-1"}, {"memory.reserve", "-1", "0"});
}

TEST(Config, MemoryInWordsAndInBytes) {
  using enum Recompute;
  EXPECT_EQ((Memory{.recompute = {kBlock}}).recompute_summary(), "block");
  EXPECT_EQ((Memory{.recompute = {kBlock, kBlock, kCheap}}).recompute_summary(), "2x block, 1x cheap");
  EXPECT_EQ((Memory{.recompute = {kNone, kBlock, kNone}}).recompute_summary(), "1x none, 1x block, 1x none");

  EXPECT_EQ((Memory{.limit = 0, .reserve = 0}).available(7), 7);
  EXPECT_EQ((Memory{.limit = 5, .reserve = 0}).available(7), 5);
  EXPECT_EQ((Memory{.limit = 9, .reserve = 0}).available(7), 7);
  EXPECT_EQ((Memory{.limit = 0, .reserve = 3}).available(7), 4);
  EXPECT_EQ((Memory{.limit = 5, .reserve = 3}).available(7), 4)
      << "the limit is the plan's, not the device's";
  EXPECT_EQ((Memory{.limit = 3, .reserve = 3}).available(7), 3);
  EXPECT_EQ((Memory{.limit = 0, .reserve = 8}).available(7), 0);
  EXPECT_EQ(Memory{}.available(80'000'000'000), 78'500'000'000);
}

TEST(Config, MalformedOverrides) {
  expect_override_rejected("train.steps", {"--set train.steps", "'='", "KEY=VALUE"});
  expect_override_rejected("=5", {"--set =5", "unknown key ''"});
  expect_override_rejected("train=5", {"'train' is an object", "train.steps=VALUE"});
  expect_override_rejected("train.optimizer={\"lr\": 1}",
                           {"'train.optimizer' is an object", "train.optimizer.lr"});
  expect_override_rejected("checkpoint.dir=\xff", {"UTF-8"});
  expect_override_rejected("checkpoint.dir=\"a\\u0000b\"", {"'checkpoint.dir'", "a\\u0000b"});
  for (const char* number :
       {"007", "0x10", "1e400", "nan", "inf", "-inf", "99999999999999999999", "", " ", "5 5"})
    expect_override_rejected(std::string("train.steps=") + number, {"'train.steps'", "an integer from 1 to"});
  for (const char* number : {"nan", "NaN", "inf", "-1", "1e400", "1e31", "0x1p3", "", "+1"})
    expect_override_rejected(std::string("train.optimizer.lr=") + number,
                             {"'train.optimizer.lr'", "a number"});
  expect_override_rejected("train.steps=" + std::string(100000, '['), {"'train.steps'"});
}

TEST(Config, FilesThatAreNotJson) {
  const auto expect_malformed = [](const std::string& text, std::initializer_list<std::string> parts) {
    SCOPED_TRACE(text);
    expect_error<InputError>([&] { parse(text, "c.json", {}); }, parts);
  };
  expect_malformed("{\n  \"train\": {\n    \"steps\": 5,\n  }\n}", {"c.json", "line 4, column 3"});
  expect_malformed("{} // comment", {"c.json", "line 1"});
  expect_malformed("{\"train\": {\"optimizer\": {\"lr\": 1, \"lr\": 1}}}", {"'train.optimizer.lr'", "twice"});
  expect_malformed("{\"train\": {}, \"train\": {}}", {"'train'", "twice"});
  expect_malformed("{\"train\": {\"steps\": 1e999}}", {"c.json", "1e999"});
  expect_malformed("", {"c.json", "empty"});
  expect_malformed(std::string("{}\0{", 4), {"c.json", "byte 2 is NUL"});
  expect_malformed(std::string(100000, '['), {"c.json", "nested more than 64 deep"});
  expect_malformed("{\"train\": {\"steps\": " + std::string(100000, '[') + std::string(100000, ']') + "}}",
                   {"nested more than 64 deep"});
  expect_malformed("{\"data\": {\"path\": \"\xff\"}}", {"UTF-8"});
  EXPECT_NO_THROW(parse(R"({"train": {"seed": 1}, "data": {"source": "random"}})", "c.json", {}));
}

TEST(Config, UnreadableFiles) {
  const test::TemporaryFolder folder;
  ASSERT_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  expect_error<InputError>([&] { load(folder.path("pipe"), {}); }, {"pipe", "empty"});  // nobody writes
  expect_error<InputError>([&] { load("/dev/zero", {}); }, {"/dev/zero", "more than 67108864 bytes"});
  expect_error<InputError>([&] { load(folder.path("absent.json"), {}); }, {"absent.json", "No such file"});
  expect_error<InputError>([&] { load(folder.path(""), {}); }, {"Is a directory"});
  expect_error<InputError>([&] { load(folder.write("empty.json", ""), {}); }, {"empty.json", "empty"});
  EXPECT_EQ(load(folder.write("good.json", R"({"train": {"steps": 4}})"), {}).train.steps, 4);
}

TEST(Config, ModelsInWeightsFilesAreInputs) {
  expect_error<InputError>([] { model_from_json(R"({"dimm": 3})", "w.safetensors"); },
                           {"w.safetensors", "'model.dimm'", "'model.dim'"});
  expect_error<InputError>([] { model_from_json(R"({"n_heads": 7})", "w.safetensors"); },
                           {"model.n_heads (7)"});
  expect_error<InputError>([] { model_from_json("{", "w.safetensors"); }, {"w.safetensors", "line 1"});
}

}  // namespace
}  // namespace minillm::config
