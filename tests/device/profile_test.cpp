// The table of cases: every case runs with the memory that it asks for, and together they are what a training
// step launches. The meter, the roofline and the report.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/gemm_cache.h"
#include "cuda/memory.h"
#include "cuda/timing.h"
#include "model/parameters.h"
#include "profile/meter.h"
#include "profile/report.h"
#include "shard/hardware.h"
#include "tests/unit/errors.h"
#include "train/trainer.h"
#ifdef MINILLM_SIM
#include "sim/blas.h"
#include "sim/counters.h"
#endif

namespace minillm::profile {
namespace {

using test::expect_error;

/// Sizes of which none divides another; three chunks of the head, the last of them short.
config::Config tiny_config() {
  config::Config config;
  config.model = {.vocab_size = 53, .dim = 40, .n_layers = 2, .n_heads = 5, .ffn_dim = 56};
  config.model.causal = true;
  config.model.rope_theta = 10000;
  config.model.final_norm = true;
  config.train.seq_len = 9;
  config.train.micro_batch = 4;
  config.train.head_chunk = 16;
  return config;
}

config::Config plain_fp32_config() {
  config::Config config = tiny_config();
  config.model.rope_theta = 0;
  config.model.final_norm = false;
  config.train.head_chunk = 18;
  config.precision.param = DType::kFp32;
  config.precision.moments = DType::kBf16;
  return config;
}

std::vector<Case> cases_of(const config::Config& config, int ranks = 1) {
  return step_cases(config, shard::make_layout(model::units(config.model), ranks));
}

/// A case's buffers in allocations of their own, with guard bytes around them.
class Memory {
 public:
  explicit Memory(const Case& c) {
    for (const Buffer& buffer : c.buffers) {
      owners_.emplace_back(buffer.bytes + 2 * kGuard);
      std::byte* const at = owners_.back().data() + kGuard;
      const auto bytes = static_cast<size_t>(buffer.bytes);
      cuda::check(cudaMemset(owners_.back().data(), kPattern, bytes + 2 * kGuard));
      if (bytes == 0) {
        // no contents
      } else if (buffer.contents == Contents::kNumbers) {
        // Other numbers in each buffer, so that a copy from one to another is seen.
        const size_t shift = owners_.size() % 2 == 0 ? kGuard : 0;
        cuda::fill_with_numbers({at - shift, bytes + shift}, nullptr);
        cuda::check(cudaMemset(at - shift, kPattern, shift));
      } else {
        cuda::check(cudaMemset(at, buffer.contents == Contents::kPositive ? 0x3f : 0, bytes));
      }
      addresses_.push_back({at});
    }
    cuda::check(cudaDeviceSynchronize());
    before_ = download();
  }

  std::span<const Address> addresses() const { return addresses_; }

  /// What is wrong with what a call has left behind; empty when nothing is.
  std::string fault() const {
    const std::vector<std::vector<unsigned char>> after = download();
    if (after == before_) return "nothing was written";
    for (size_t buffer = 0; buffer < after.size(); ++buffer) {
      const std::vector<unsigned char>& bytes = after[buffer];
      for (size_t i = 0; i < kGuard; ++i)
        if (bytes[i] != kPattern || bytes[bytes.size() - 1 - i] != kPattern)
          return "bytes around buffer " + std::to_string(buffer) + " were written";
    }
    return "";
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr unsigned char kPattern = 0xa5;

  std::vector<std::vector<unsigned char>> download() const {
    std::vector<std::vector<unsigned char>> all;
    for (const cuda::DeviceMemory& owner : owners_) {
      all.emplace_back(static_cast<size_t>(owner.bytes()));
      cuda::check(cudaMemcpy(all.back().data(), owner.data(), all.back().size(), cudaMemcpyDeviceToHost));
    }
    return all;
  }

  std::vector<cuda::DeviceMemory> owners_;
  std::vector<Address> addresses_;
  std::vector<std::vector<unsigned char>> before_;
};

class Runner {
 public:
  void run(const Case::Function& function, const Memory& memory) {
    function({memory.addresses(), blas_, stream_.get()});
    stream_.synchronize();
  }

 private:
  cuda::Stream stream_;
  cuda::DeviceMemory workspace_{cuda::BlasLt::workspace_bytes()};
  cuda::BlasLt blas_{workspace_.data()};
};

TEST(Cases, EachRunsInItsBuffers) {
  Runner runner;
  for (const config::Config& config : {tiny_config(), plain_fp32_config()}) {
    for (const Case& c : cases_of(config)) {
      SCOPED_TRACE(c.name);
      const Memory memory(c);
      if (c.prepare) runner.run(c.prepare, memory);
      runner.run(c.run, memory);
      EXPECT_EQ(memory.fault(), "");
    }
  }
}

TEST(Cases, BuffersThatAreTooSmallAreNoticed) {
  Runner runner;
  Case c = matching(cases_of(tiny_config()), "silu_forward").front();
  c.buffers[0].bytes -= 2;
  const Memory memory(c);
  runner.run(c.run, memory);
  EXPECT_EQ(memory.fault(), "bytes around buffer 0 were written");
  const Memory untouched(c);
  EXPECT_EQ(untouched.fault(), "nothing was written");
}

TEST(Cases, NamesAreUniqueAndThoseOfAStepComeFirst) {
  for (const config::Config& config : {tiny_config(), plain_fp32_config()}) {
    std::set<std::string> names;
    bool in_step = true;
    for (const Case& c : cases_of(config)) {
      EXPECT_TRUE(names.insert(c.name).second) << c.name;
      EXPECT_TRUE(in_step || c.calls == 0) << c.name;
      in_step = c.calls > 0;
    }
    EXPECT_EQ(names.count("rope"), 1u);
  }
}

TEST(Cases, RanksShareTheOptimizer) {
  const auto bytes = [](int ranks, const std::string& pattern) {
    return matching(cases_of(tiny_config(), ranks), pattern).front().cost.bytes;
  };
  EXPECT_NEAR(static_cast<double>(bytes(1, "adamw, block")) / static_cast<double>(bytes(2, "adamw, block")),
              2, 0.1);
  EXPECT_EQ(bytes(1, "cross_entropy"), bytes(2, "cross_entropy"));
}

TEST(Cases, Matching) {
  EXPECT_EQ(matching(cases_of(tiny_config()), "^gemm (up|down)$").size(), 2u);
  EXPECT_EQ(matching(cases_of(tiny_config()), "").size(), cases_of(tiny_config()).size());
  expect_error<UsageError>([] { matching(cases_of(tiny_config()), "("); },
                           {"--only (", "regular expression"});
  expect_error<UsageError>([] { matching(cases_of(tiny_config()), "soft"); },
                           {"--only soft", "rmsnorm_forward"});
}

TEST(Cases, TakingAnotherNumberOfBuffersIsADefect) {
  Runner runner;
  const Case c{.name = "odd", .buffers = {fp32(1)}, .run = [](const Operands& o) { o.take<2>(); }};
  const Memory memory(c);
  EXPECT_THROW(runner.run(c.run, memory), InternalError);
}

#ifdef MINILLM_SIM
/// Launches by kernel, and products.
using Launches = std::map<std::string, int64_t>;

int64_t products() {
  int64_t sum = 0;
  for (const int64_t count : sim::blas_record().products) sum += count;
  return sum;
}

template <class Work>
Launches launches_of(const Work& work) {
  const int64_t products_before = products();
  const std::map<std::string, int64_t> before = sim::counters().launches;
  work();
  Launches launches;
  for (const auto& [kernel, count] : sim::counters().launches) {
    const auto found = before.find(kernel);
    if (const int64_t added = count - (found == before.end() ? 0 : found->second); added > 0)
      launches[kernel] = added;
  }
  launches["product"] = products() - products_before;
  return launches;
}

TEST(Cases, AreWhatAStepLaunches) {
  const std::unique_ptr<comm::Bootstrap> alone = comm::make_single_process();
  for (const config::Config& config : {tiny_config(), plain_fp32_config()}) {
    train::Trainer trainer(config, *alone);
    const Launches step = launches_of([&] {
      std::ranges::fill(trainer.tokens(0), 3);
      std::ranges::fill(trainer.targets(0), 5);
      trainer.enqueue(0);
      trainer.result(0);
    });
    Launches table;
    Runner runner;
    for (const Case& c : cases_of(config)) {
      const Memory memory(c);
      int64_t launches = 0;
      for (const auto& [kernel, count] : launches_of([&] { runner.run(c.run, memory); })) {
        launches += count;
        if (c.calls > 0) table[kernel] += c.calls * count;
      }
      EXPECT_GT(launches, 0) << c.name << " could be left out without a difference";
    }
    EXPECT_EQ(table, step);
  }
}
#endif

TEST(Meter, TakesOtherOperandsEachTime) {
  std::vector<std::byte*> run, prepared;
  const Case c{.name = "recorded",
               .buffers = {{1 << 20}, positive(1)},
               .run = [&](const Operands& o) { run.push_back(o.buffers[0].at); },
               .prepare = [&](const Operands& o) { prepared.push_back(o.buffers[0].at); }};
  Meter meter({.repeats = 5});
  EXPECT_GT(meter.seconds(c), 0);
  EXPECT_EQ(run.size(), 6u) << "one before the timed ones";
  EXPECT_EQ(std::vector(run.begin() + 1, run.end()), prepared);
  EXPECT_EQ(std::set(prepared.begin(), prepared.end()).size(), 5u);
}

TEST(Meter, FillsBuffers) {
  std::vector<int32_t> tokens(100);
  float scale = 0;
  const Case c{.name = "contents", .buffers = {ids(100, 7), positive(1)}, .run = [&](const Operands& o) {
                 const auto [ids, one] = o.take<2>();
                 const int32_t* const from = ids;
                 const float* const from_one = one;
                 cuda::check(cudaMemcpyAsync(tokens.data(), from, 400, cudaMemcpyDeviceToHost, o.stream));
                 cuda::check(cudaMemcpyAsync(&scale, from_one, 4, cudaMemcpyDeviceToHost, o.stream));
               }};
  Meter({.repeats = 1}).seconds(c);
  EXPECT_EQ(std::set(tokens.begin(), tokens.end()), (std::set<int32_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_TRUE(0.5f < scale && scale < 1) << scale;
}

TEST(Meter, MeasuresProductsOfEitherChoice) {
  for (const bool fastest : {false, true}) {
    Meter meter({.repeats = 3, .fastest_products = fastest});
    for (const Case& c : matching(cases_of(tiny_config()), "^gemm (qkv|logits dW)$"))
      EXPECT_GT(meter.seconds(c), 0) << c.name;
  }
}

TEST(Meter, TooLittleMemoryNamesTheCase) {
  Meter meter({.repeats = 2});
  const Case c{.name = "huge", .buffers = {{int64_t{1} << 50}}, .run = [](const Operands&) {}};
  expect_error<MemoryError>([&] { meter.seconds(c); }, {"bench: huge: out of device memory", "--only"});
}

TEST(Roofline, IsTheLargerOfTwoTimes) {
  const Roofline roofline{.copy_bytes_per_s = 100, .gemm_flops_per_s = 1000};
  EXPECT_EQ(roofline.floor_s({.bytes = 200, .flops = 1000, .extra_bytes = 900}), 2);
  EXPECT_TRUE(roofline.memory_bound({.bytes = 200, .flops = 1000}));
  EXPECT_EQ(roofline.floor_s({.bytes = 200, .flops = 3000}), 3);
  EXPECT_FALSE(roofline.memory_bound({.bytes = 200, .flops = 3000}));
}

TEST(Roofline, IsMeasured) {
#ifdef MINILLM_SIM
  GTEST_SKIP() << "a CPU takes minutes for such a product";
#endif
  const Roofline roofline = measure_roofline(DType::kBf16, 5);
  EXPECT_GT(roofline.copy_bytes_per_s, 5e10) << "slower than any supported GPU";
  EXPECT_GT(roofline.gemm_flops_per_s, 1e13);
  EXPECT_LT(roofline.kernel_s, 1e-4);
}

TEST(Roofline, MeasuresAKernelThatDoesNothing) {
  EXPECT_GT(measure_kernel_s(5), 0);
#ifndef MINILLM_SIM
  EXPECT_LT(measure_kernel_s(5), 1e-4) << "launches of any supported GPU take some microseconds";
#endif
}

Report planted_report() {
  Report report{.config = tiny_config()};
  report.cases = {{.name = "moves", .calls = 3, .cost = {.bytes = 2'000'000'000, .extra_bytes = 500'000'000}},
                  {.name = "computes", .calls = 1, .cost = {.bytes = 1, .flops = 4'000'000'000'000}},
                  {.name = "idles", .calls = 0, .cost = {.bytes = 1'000'000'000}}};
  return report;
}

TEST(Report, TellsSharesAndPercentOfTheFloor) {
  Report report = planted_report();
  report.times = Times{.roofline = {.copy_bytes_per_s = 4e12, .gemm_flops_per_s = 800e12},
                       .repeats = 20,
                       .seconds = {1e-3, 6.25e-3, 1e-3}};
  std::ostringstream text;
  print_table(report, text);
  const std::string table = text.str();
  for (const char* part : {"4 x 9 tokens per rank, bf16, moments fp32, logits of 16 rows at a time, 1 rank\n",
                           "copy 4000.0 GB/s, product 800.0 TFLOPS; medians of 20 calls",
                           "moves                            3       2 GB     500 MB   1.25      0 flop"
                           "    1000.00 us     500.00 us    50.0%    2000.0 GB/s   32.4%\n",
                           "   80.0%   640.0 TFLOPS   67.6%\n", "not in a step of this configuration:\nidles",
                           "       -\n", "9250.00 us\n"})
    EXPECT_NE(table.find(part), std::string::npos) << part << "\n" << table;
  const std::string json = to_json(report);
  for (const char* part :
       {"\"copy_bandwidth_bytes_per_s\": 4000000000000.0", "\"gemm_rate_flops_per_s\": 800000000000000.0",
        "\"median_s\": 0.001", "\"floor_s\": 0.0005", "\"percent_of_floor\": 50.0", "\"bound\": \"compute\"",
        "\"step_s\": 0.00925", "\"simulated\": false"})
    EXPECT_NE(json.find(part), std::string::npos) << part << "\n" << json;
}

TEST(Report, DescribesTheHardware) {
  Report report = planted_report();
  report.times = Times{.roofline = {.copy_bytes_per_s = 4e12, .gemm_flops_per_s = 8e14, .kernel_s = 2e-6},
                       .repeats = 20,
                       .seconds = {1, 1, 1}};
  EXPECT_EQ(to_json(report).find("\"hardware\": {"), std::string::npos) << "attention was not measured";
  report.cases.push_back({.name = "attention_forward", .cost = {.flops = 400}});
  report.cases.push_back({.name = "attention_backward", .cost = {.flops = 1000}});
  report.times->seconds.insert(report.times->seconds.end(), {2, 5});
  const shard::Hardware hardware = shard::parse_hardware(to_json(report), "bench.json");
  EXPECT_EQ(hardware.name, cuda::gemm_device().name);
  EXPECT_EQ(hardware.gemm_flops_per_s, 8e14);
  EXPECT_EQ(hardware.attention_flops_per_s, 200);
  EXPECT_EQ(hardware.memory_bytes_per_s, 4e12);
  EXPECT_EQ(hardware.kernel_s, 2e-6);
  EXPECT_EQ(hardware.memory_bytes, cuda::device_capacity().total);
  EXPECT_EQ(hardware.multiprocessors, cuda::gemm_device().multiprocessors);
  EXPECT_FALSE(hardware.link || hardware.network || hardware.peak_flops_per_s);
}

TEST(Report, HasNoTimesWhenThereAreNone) {
  std::ostringstream text;
  print_table(planted_report(), text);
  EXPECT_NE(text.str().find("simulated device: counts only\n"), std::string::npos);
  EXPECT_EQ(text.str().find(" us"), std::string::npos) << text.str();
  const std::string json = to_json(planted_report());
  for (const char* key : {"_s\"", "percent", "bound", "repeats"})
    EXPECT_EQ(json.find(key, json.find("\"ranks\"")), std::string::npos) << key;
  EXPECT_NE(json.find("\"extra_bytes\": 500000000"), std::string::npos);
}

}  // namespace
}  // namespace minillm::profile
