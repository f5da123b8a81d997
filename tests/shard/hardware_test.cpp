// Descriptions of hardware: those of the program, and how wrong ones are refused.
#include "shard/hardware.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "core/error.h"
#include "tests/unit/errors.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::shard {
namespace {

using test::expect_error;

const std::filesystem::path kFolder = MINILLM_SOURCE_DIR "/configs/hardware";

std::string minimal(const std::string& more = "") {
  return R"({"name": "toy", "source": "here", "gemm_flops_per_s": 1e12, "attention_flops_per_s": 5e11,
             "memory_bytes_per_s": 1e11, "kernel_s": 1e-6, "memory_bytes": 8e9)" +
         more + "}";
}

TEST(Hardware, TheProgramHasAllFiles) {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) files.insert(entry.path().stem());
  const std::vector<std::string> names = hardware_names();
  EXPECT_EQ(names, (std::vector<std::string>{files.begin(), files.end()}));
  for (const std::string& name : names)
    EXPECT_EQ(to_json(hardware_by_name(name)), to_json(load_hardware(kFolder / (name + ".json")))) << name;
}

TEST(Hardware, ItsFiguresArePossible) {
  for (const std::string& name : hardware_names()) {
    SCOPED_TRACE(name);
    const Hardware hardware = hardware_by_name(name);
    ASSERT_TRUE(hardware.peak_flops_per_s && hardware.link && hardware.network);
    EXPECT_LT(hardware.gemm_flops_per_s, *hardware.peak_flops_per_s);
    EXPECT_LT(hardware.attention_flops_per_s, hardware.gemm_flops_per_s);
    EXPECT_GT(hardware.gemm_flops_per_s, *hardware.peak_flops_per_s / 2);
    EXPECT_LT(hardware.link->bytes_per_s, hardware.memory_bytes_per_s);
    EXPECT_LT(hardware.network->bytes_per_s, hardware.link->bytes_per_s);
    EXPECT_LT(hardware.link->latency_s, hardware.network->latency_s);
    EXPECT_LT(hardware.collective_ctas, hardware.multiprocessors / 4);
    EXPECT_NE(hardware.source.find("multiprocessors: "), std::string::npos);
    EXPECT_NE(hardware.source.find("collective_ctas: "), std::string::npos);
    for (const char* figure : {"peak", "gemm", "attention", "kernel", "link", "network", "memory_bytes"})
      EXPECT_TRUE(name == "h200" || hardware.source.find(figure) != std::string::npos) << figure;
  }
  const Hardware h100 = hardware_by_name("h100");
  EXPECT_EQ(h100.link->bytes_per_s, 350e9);
  EXPECT_EQ(h100.link->ranks, 8);
  EXPECT_EQ(h100.network->bytes_per_s, 45e9);
}

TEST(Hardware, RoundTrip) {
  const Hardware read = parse_hardware(
      minimal(R"(, "peak_flops_per_s": 2e12, "link": {"latency_s": 0, "bytes_per_s": 7.5, "ranks": 2},
                   "network": {"latency_s": 1e-5, "bytes_per_s": 3})"),
      "toy.json");
  EXPECT_EQ(read.memory_bytes, 8'000'000'000);
  EXPECT_EQ(read.peak_flops_per_s, 2e12);
  EXPECT_EQ(read.link->bytes_per_s, 7.5);
  EXPECT_EQ(read.link->ranks, 2);
  EXPECT_EQ(read.network->latency_s, 1e-5);
  EXPECT_EQ(to_json(parse_hardware(to_json(read), "again")), to_json(read));
  const Hardware alone = parse_hardware(minimal(), "toy.json");
  EXPECT_EQ(alone.multiprocessors + alone.collective_ctas, 0) << "not known";
  EXPECT_FALSE(alone.link || alone.network || alone.peak_flops_per_s);
  EXPECT_EQ(to_json(parse_hardware(to_json(alone), "again")), to_json(alone));
}

TEST(Hardware, ReportsOfBenchAreDescriptions) {
  EXPECT_EQ(parse_hardware(R"({"format": 1, "cases": [], "hardware": )" + minimal() + "}", "bench.json").name,
            "toy");
  expect_error<InputError>([] { parse_hardware(R"({"format": 1, "cases": []})", "bench.json"); },
                           {"bench.json", "'hardware'", "simulated device", "--only"});
  expect_error<InputError>(
      [] { parse_hardware(R"({"cases": [], "hardware": )" + minimal(R"(, "x": 1)") + "}", "bench.json"); },
      {"bench.json", "'hardware.x'"});
}

TEST(Hardware, RefusesWhatItDoesNotUnderstand) {
  const auto refuse = [](const std::string& text, std::initializer_list<std::string> parts) {
    expect_error<InputError>([&] { parse_hardware(text, "toy.json"); }, {"toy.json: "});
    expect_error<InputError>([&] { parse_hardware(text, "toy.json"); }, parts);
  };
  const auto with = [](const std::string& key, const std::string& value) {
    std::string text = minimal(R"(, "link": {"latency_s": 0, "bytes_per_s": 1, "ranks": 2})");
    const size_t at = text.find("\"" + key + "\": ") + key.size() + 4;
    return text.replace(at, text.find_first_of(",}", at) - at, value);
  };
  EXPECT_EQ(parse_hardware(with("kernel_s", "0"), "toy.json").kernel_s, 0);
  refuse("[]", {"an array", "an object"});
  refuse("{", {"not valid JSON", "line 1"});
  refuse("{}", {"'name' is missing"});
  refuse(with("name", "7"), {"'name' is 7", "a text"});
  refuse(with("source", "\"\""), {"'source' is \"\"", "not empty"});
  refuse(with("gemm_flops_per_s", "0"), {"'gemm_flops_per_s' is 0", "a number from 1 to 1e30"});
  refuse(with("memory_bytes_per_s", "\"fast\""),
         {"'memory_bytes_per_s' is \"fast\"", "a number from 1 to 1e30"});
  refuse(with("kernel_s", "-1e-6"), {"'kernel_s' is -1e-06", "seconds from 0 to 1e6"});
  refuse(with("memory_bytes", "1.5"), {"'memory_bytes' is 1.5", "an integer"});
  refuse(with("memory_bytes", "0"), {"'memory_bytes' is 0", "from 1"});
  refuse(minimal(R"(, "multiprocessors": 0)"), {"'multiprocessors' is 0", "from 1"});
  refuse(minimal(R"(, "collective_ctas": 1.5)"), {"'collective_ctas' is 1.5", "an integer"});
  refuse(with("ranks", "null"), {"'link.ranks' is null", "an integer"});
  refuse(with("bytes_per_s", "-1"), {"'link.bytes_per_s' is -1", "a number from 1 to 1e30"});
  refuse(minimal(R"(, "link": 3)"), {"'link' is 3", "an object"});
  refuse(minimal(R"(, "network": {"latency_s": 0})"), {"'network.bytes_per_s' is missing"});
  refuse(minimal(R"(, "gem_flops_per_s": 1)"), {"unknown key 'gem_flops_per_s'", "'gemm_flops_per_s'"});
  refuse(minimal(R"(, "network": {"latency_s": 0, "bytes_per_s": 1, "rank": 1})"),
         {"unknown key 'network.rank'"});
  refuse(minimal(R"(, "kernel_s": 1)"), {"'kernel_s' appears twice"});
}

TEST(Hardware, NamesAndFilesThatAreNotThere) {
  expect_error<UsageError>([] { hardware_by_name("h10"); },
                           {"'h10'", "did you mean 'h100'", "a100, b200, h100, h200", "configs/hardware"});
  const test::TemporaryFolder folder;
  EXPECT_EQ(find_hardware("h200").name, hardware_by_name("h200").name);
  EXPECT_EQ(find_hardware(kFolder / "h200.json").name, hardware_by_name("h200").name);
  expect_error<UsageError>([] { find_hardware("h10"); }, {"did you mean 'h100'"});
  expect_error<InputError>([&] { find_hardware(folder.path("absent")); }, {"absent", "No such file"});
  expect_error<InputError>([&] { load_hardware(folder.path("absent.json")); },
                           {"absent.json", "No such file"});
  expect_error<InputError>([&] { load_hardware(folder.write("empty.json", "")); }, {"empty.json", "empty"});
}

}  // namespace
}  // namespace minillm::shard
