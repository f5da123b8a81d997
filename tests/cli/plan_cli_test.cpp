// `minillm plan` as a user runs it: what it prints, as text, as JSON and as a trace, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <utility>

#include "command.h"
#include "core/error.h"
#include "core/format.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

const std::string kReference = MINILLM_SOURCE_DIR "/configs/minillm.json";
const std::string kH100 = MINILLM_SOURCE_DIR "/configs/hardware/h100.json";

class Plan : public ::testing::Test {
 protected:
  static Result plan(const Arguments& arguments) {
    Arguments command{"plan", kReference};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return minillm(command);
  }

  static std::string text(const Arguments& arguments) {
    const Result result = plan(arguments);
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(result.err, "");
    return result.out;
  }

  static Json json(Arguments arguments) {
    arguments.emplace_back("--json");
    return Json::parse(text(arguments));
  }

  static void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
    for (const std::string& part : parts) EXPECT_GT(count(text, part), 0) << part << " is not in\n" << text;
  }

  static void expect_failure(const Arguments& arguments, ExitCode code,
                             std::initializer_list<std::string> parts) {
    const Result result = plan(arguments);
    expect_failed(result, code, parts);
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(result.err.starts_with("error: ")) << result;
  }

  /// The figures of a row of the table, by column.
  static std::vector<std::string> row(const std::string& text, const std::string& name) {
    std::smatch found;
    const std::regex line("\n  " + name + " +([0-9].*)");
    if (!std::regex_search(text, found, line)) return {};
    std::vector<std::string> values;
    const std::regex value("([0-9.]+) ?(MB|ms|%|k)");
    const std::string figures = found[1];
    for (std::sregex_iterator at(figures.begin(), figures.end(), value), end; at != end; ++at)
      values.push_back(at->str(1));
    return values;
  }

  TemporaryFolder folder_;
};

TEST_F(Plan, Help) {
  const Result help = minillm({"plan", "--help"});
  EXPECT_EQ(help.exit_code, 0) << help;
  expect_parts(help.out,
               {"CONFIG", "--set KEY=VALUE", "--world", "--policy POLICY", "full", "fsdp2", "--group",
                "--gpu NAME", "--hardware FILE", "--network GB/s", "--ranks-per-node", "--schedule",
                "--trace FILE", "--json", "without a GPU", "a100 b200 h100 h200 rtx5090"});
  EXPECT_GT(count(minillm({"--help"}).out, "\n  plan "), 0);
}

TEST_F(Plan, ShowsMemoryTrafficTimesAndLanesBesideFsdp2) {
  const std::string out = text({"--world", "8"});
  expect_parts(out,
               {"735199232 parameters in bf16; 1 x 8 x 1024 tokens", "NVIDIA H100 SXM: 8 ranks, 8 per node",
                "policy full: 1 copy of the model on 8 ranks; recompute cheap", "weight slots: 2 for blocks",
                "gradient slots: 2, 3 more for 2 deferred blocks", " full           fsdp2\n",
                "fsdp2 goes without memory.recompute\n", "\ncompute   ", "\ngather    ", "\nreduce    ",
                "\nupdate    ", "G gather", "E embedding, H head", "communication is exposed for"});
  for (const char* name :
       {"parameters", "moments", "gradients", "weight slots", "gradient slots", "activations", "scratch",
        "inputs", "workspace", "peak", "available", "all-gather", "reduce-scatter", "all-reduce", "step",
        "of it exposed", "tokens/s per GPU", "MFU"})
    EXPECT_EQ(row(out, name).size(), 2u) << name << "\n" << out;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 110u) << line;
}

void expect_numbers(const Json& numbers, const std::string& policy, int world) {
  EXPECT_EQ(numbers["policy"], policy);
  EXPECT_EQ(numbers["world"], world);
  EXPECT_EQ(numbers["shards"].get<int>() * numbers["replicas"].get<int>(), world);
  EXPECT_GT(numbers["memory"]["peak_bytes"].get<int64_t>(), 0);
  EXPECT_EQ(numbers["memory"]["by_purpose"].size(), 9u);
  for (const char* kind : {"all_gather", "reduce_scatter", "all_reduce"})
    EXPECT_TRUE(numbers["comm"]["bytes_per_rank"][kind].is_number_integer()) << kind;
  EXPECT_NEAR(numbers["time"]["compute_s"].get<double>() + numbers["time"]["exposed_comm_s"].get<double>(),
              numbers["time"]["step_s"].get<double>(), 1e-12);
  EXPECT_GT(numbers["mfu"], 0);
}

TEST_F(Plan, JsonSaysWhatTheTextSays) {
  const Arguments arguments = {"--world", "8", "--group", "4"};
  const Json document = json(arguments);
  const std::string out = text(arguments);
  expect_numbers(document, "hybrid", 8);
  expect_numbers(document["peer"], "fsdp2", 8);
  EXPECT_EQ(document["hardware"], "NVIDIA H100 SXM");
  EXPECT_EQ(document["peer"]["left_out"], Json::parse(R"(["memory.recompute"])"));
  EXPECT_EQ(document["settings"],
            Json::parse(R"({"weight_slots": 3, "gradient_slots": 5, "deferred_blocks": 2,
                                  "head_chunk": 2048, "recompute": "cheap", "cuda_graph": false})"));
  const auto in_table = [&](const char* name, double scale, const char* pattern, const auto& value) {
    std::vector<std::string> expected;
    for (const Json* numbers : {&std::as_const(document), &std::as_const(document["peer"])})
      expected.push_back(format(pattern, value(*numbers) * scale));
    EXPECT_EQ(row(out, name), expected) << name;
  };
  const auto at = [](const char* pointer) {
    return [=](const Json& numbers) { return numbers.at(Json::json_pointer(pointer)).get<double>(); };
  };
  in_table("peak", 1e-6, "%.1f", at("/memory/peak_bytes"));
  in_table("available", 1e-6, "%.1f", at("/memory/available_bytes"));
  for (const char* purpose : {"parameters", "moments", "weight slots", "activations"})
    in_table(purpose, 1e-6, "%.1f", at((std::string("/memory/by_purpose/") + purpose).c_str()));
  in_table("all-gather", 1e-6, "%.1f", at("/comm/bytes_per_rank/all_gather"));
  in_table("reduce-scatter", 1e-6, "%.1f", at("/comm/bytes_per_rank/reduce_scatter"));
  in_table("all-reduce", 1e-6, "%.1f", at("/comm/bytes_per_rank/all_reduce"));
  in_table("step", 1e3, "%.3f", at("/time/step_s"));
  in_table("of it exposed", 1e3, "%.3f", at("/time/exposed_comm_s"));
  in_table("tokens/s per GPU", 1e-3, "%.1f", at("/tokens_per_s_per_gpu"));
  in_table("MFU", 100, "%.1f", at("/mfu"));
}

TEST_F(Plan, ScheduleListsOperations) {
  const std::string out = text({"--world", "2", "--schedule"});
  const std::regex line(R"(\n +\d+ +-?\d+\.\d{3} +-?\d+\.\d{3} ms  (\w+) +([a-z-]+)[^\n]*)");
  std::set<std::string> streams, kinds;
  for (std::sregex_iterator at(out.begin(), out.end(), line), end; at != end; ++at) {
    streams.insert(at->str(1));
    kinds.insert(at->str(2));
  }
  EXPECT_EQ(streams, (std::set<std::string>{"compute", "gather", "reduce", "update"}));
  for (const char* kind :
       {"upload", "gather", "forward", "loss", "backward", "reduce-scatter", "update", "read"})
    EXPECT_TRUE(kinds.contains(kind)) << kind;
  expect_parts(out, {"gather block2 -> weight slot ", "; waits for ", " of the step before",
                     "-> gradient slot ", "(shard slot ", ", for the next step"});
  EXPECT_EQ(count(text({"--world", "2"}), "waits for"), 0);
}

TEST_F(Plan, WritesATrace) {
  const std::string path = folder_.path("trace.json");
  text({"--world", "4", "--trace", path});
  const Json trace = Json::parse(folder_.read("trace.json"));
  std::set<std::string> phases, names;
  for (const Json& event : trace["traceEvents"]) {
    const std::string phase = event["ph"];
    phases.insert(phase);
    names.insert(event["name"]);
    EXPECT_TRUE(event["pid"].is_number() && event["tid"].is_number());
    EXPECT_TRUE(phase != "X" || (event["ts"] >= 0 && event["dur"] >= 0)) << event;
  }
  EXPECT_EQ(phases, (std::set<std::string>{"M", "X", "s", "f"}));
  for (const char* name : {"thread_name", "forward block11 (weight slot 1)", "loss head", "update embedding"})
    EXPECT_TRUE(std::ranges::any_of(names, [&](const std::string& n) { return n.starts_with(name); }))
        << name;
}

TEST_F(Plan, TraceIsWholeOrNotThere) {
  expect_failure({"--world", "4", "--trace", folder_.path("absent/trace.json")}, ExitCode::kInput,
                 {"absent/trace.json", "cannot be written", "No such file"});
  // A folder of that name cannot be replaced, and nothing is left beside it.
  std::filesystem::create_directory(folder_.path("taken"));
  expect_failure({"--world", "4", "--trace", folder_.path("taken")}, ExitCode::kInput,
                 {"taken", "cannot be written"});
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path("")))
    EXPECT_FALSE(entry.path().filename().string().starts_with("taken.")) << entry;
  expect_failure({"--world", "6", "--group", "4", "--trace", folder_.path("none.json")}, ExitCode::kUsage,
                 {"6"});
  EXPECT_FALSE(std::filesystem::exists(folder_.path("none.json")));
}

TEST_F(Plan, Policies) {
  struct Case {
    Arguments arguments;
    std::string policy;
    int shards;
    bool gathers, reduces, sums;
  };
  for (const Case& c :
       std::vector<Case>{{{"--policy", "full"}, "full", 8, true, true, false},
                         {{"--policy", "grads"}, "grads", 8, true, true, false},
                         {{"--policy", "replicate"}, "replicate", 1, false, false, true},
                         {{"--policy", "hybrid", "--group", "4"}, "hybrid", 4, true, true, true},
                         {{"--group", "2"}, "hybrid", 2, true, true, true},
                         {{"--policy", "fsdp2"}, "fsdp2", 8, true, true, false},
                         {{"--policy", "fsdp2", "--group", "4"}, "fsdp2", 4, true, true, true}}) {
    SCOPED_TRACE(c.policy);
    Arguments arguments = c.arguments;
    arguments.insert(arguments.end(), {"--world", "8"});
    const Json document = json(arguments);
    expect_numbers(document, c.policy, 8);
    EXPECT_EQ(document["shards"], c.shards);
    EXPECT_EQ(document.contains("peer"), c.policy != "fsdp2");
    const Json& bytes = document["comm"]["bytes_per_rank"];
    EXPECT_EQ(bytes["all_gather"] > 0, c.gathers);
    EXPECT_EQ(bytes["reduce_scatter"] > 0, c.reduces);
    EXPECT_EQ(bytes["all_reduce"] > 0, c.sums);
  }
}

TEST_F(Plan, AutoPrintsWhatItChoseFrom) {
  const Arguments arguments = {"--world", "8", "--policy", "auto", "--set", "memory.limit=7000000000"};
  const std::string out = text(arguments);
  EXPECT_EQ(count(out, "\n> "), 1) << out;
  expect_parts(out, {"\n  replicate ", "\n  hybrid ", "does not fit", "\npolicy "});
  const Json chosen = json(arguments);
  EXPECT_NE(chosen["policy"], "auto");
  EXPECT_LE(chosen["memory"]["peak_bytes"], 7'000'000'000);
  EXPECT_EQ(chosen["memory"]["available_bytes"], 7'000'000'000);
  std::smatch marked;
  ASSERT_TRUE(std::regex_search(out, marked, std::regex(R"(\n> (\w+) .* ([0-9.]+) ms +[0-9.]+ ms\n)")))
      << out;
  EXPECT_EQ(marked[1], chosen["policy"]);
  EXPECT_EQ(marked[2], format("%.2f", chosen["time"]["step_s"].get<double>() * 1e3));
}

TEST_F(Plan, Fsdp2TellsWhatItGoesWithout) {
  const Arguments arguments = {"--world", "4", "--policy", "fsdp2", "--set", "precision.reduce=bf16"};
  expect_parts(text(arguments), {"\nfsdp2 goes without memory.recompute, precision.reduce\n"});
  EXPECT_EQ(json(arguments)["left_out"], Json::parse(R"(["memory.recompute", "precision.reduce"])"));
  EXPECT_EQ(count(text({"--world", "4", "--set", "memory.recompute=none"}), "goes without"), 0);
}

TEST_F(Plan, AnyNumberOfRanks) {
  for (const char* world : {"1", "3", "7", "4096"})
    for (const char* policy : {"full", "grads", "replicate", "fsdp2"})
      expect_numbers(json({"--world", world, "--policy", policy}), policy, std::stoi(world));
  expect_parts(text({"--world", "1"}),
               {"1 copy of the model on 1 rank;", "no gathers", "H100 SXM: 1 rank, 1 per"});
  const std::string automatic = text({"--world", "4096", "--policy", "auto"});
  EXPECT_EQ(count(automatic, "\n> "), 1) << automatic;
}

TEST_F(Plan, HardwareByNameByFileAndFromTheConfiguration) {
  const auto name = [](Arguments arguments) {
    arguments.insert(arguments.end(), {"--world", "2"});
    return json(arguments)["hardware"].get<std::string>();
  };
  EXPECT_EQ(name({}), "NVIDIA H100 SXM");
  EXPECT_EQ(name({"--gpu", "b200"}), "NVIDIA B200 SXM");
  EXPECT_EQ(name({"--hardware", kH100}), "NVIDIA H100 SXM");
  const Arguments automatic = {"--policy", "auto", "--set", "parallel.hardware=b200"};
  EXPECT_EQ(name(automatic), "NVIDIA B200 SXM") << "as in a run";
  Arguments given = automatic;
  given.insert(given.end(), {"--gpu", "a100"});
  EXPECT_EQ(name(given), "NVIDIA A100 SXM 80 GB");
}

TEST_F(Plan, NodesNeedANetwork) {
  Json hardware = Json::parse(std::ifstream(kH100));
  hardware.erase("network");
  const std::string path = folder_.write("island.json", hardware.dump());
  expect_failure({"--world", "16", "--hardware", path}, ExitCode::kUsage,
                 {"'network' is not given", "\"network\": {\"latency_s\": …", "--network"});
  EXPECT_EQ(json({"--world", "8", "--hardware", path})["world"], 8);
  const double slow = json({"--world", "16", "--hardware", path, "--network", "5"})["time"]["step_s"];
  const double fast = json({"--world", "16", "--hardware", path, "--network", "50"})["time"]["step_s"];
  EXPECT_GT(slow, fast);
  const double in_a_node =
      json({"--world", "16", "--hardware", path, "--ranks-per-node", "16"})["time"]["step_s"];
  EXPECT_LE(in_a_node, fast);
  hardware.erase("link");
  expect_failure({"--world", "2", "--hardware", folder_.write("alone.json", hardware.dump())},
                 ExitCode::kUsage, {"'link' is not given", "\"ranks\": …"});
}

TEST_F(Plan, TooLittleMemory) {
  expect_failure({"--world", "8", "--policy", "auto", "--set", "memory.limit=2400000000"}, ExitCode::kMemory,
                 {"no policy fits 2400000000 bytes", "\n  full ", "\n  replicate ", "does not fit",
                  "smallest is --set parallel.policy=full --set memory.recompute=block", "train.micro_batch",
                  "it fits with --set parallel.gradient_slots=1"});
  // A policy that was asked for is shown all the same, with what to change.
  const std::string out = text({"--world", "8", "--set", "memory.limit=4000000000"});
  expect_parts(out, {"\nfull does not fit. The largest train.micro_batch that fits is ",
                     "As it is, it fits with --set memory.recompute=block.\n"});
  EXPECT_EQ(
      count(text({"--world", "8", "--set", "memory.limit=4000000000", "--set", "memory.recompute=block"}),
            "does not fit"),
      0);
}

TEST_F(Plan, Errors) {
  expect_failure({"--world", "8", "--policy", "zero3"}, ExitCode::kUsage,
                 {"zero3", "\"full\"", "\"hybrid\""});
  expect_failure({"--world", "6", "--policy", "hybrid", "--group", "4"}, ExitCode::kUsage,
                 {"parallel.group_size is 4", "6 ranks"});
  expect_failure({"--world", "8", "--policy", "full", "--group", "4"}, ExitCode::kUsage,
                 {"parallel.group_size (4)", "parallel.policy (\"full\")"});
  expect_failure({"--world", "8", "--gpu", "h10"}, ExitCode::kUsage,
                 {"'h10'", "did you mean 'h100'", "a100, b200, h100, h200, rtx5090"});
  expect_failure({"--world", "8", "--hardware", "absent.json"}, ExitCode::kInput,
                 {"absent.json", "No such file"});
  expect_failure({"--world", "8", "--hardware", folder_.write("bad.json", R"({"name": "x", "source": 1})")},
                 ExitCode::kInput, {"bad.json", "'source'"});
  expect_failure({"--world", "8", "--gpu", "h100", "--hardware", kH100}, ExitCode::kUsage,
                 {"--gpu", "--hardware"});
  expect_failure({"--world", "8", "--json", "--schedule"}, ExitCode::kUsage, {"--json", "--schedule"});
  expect_failure({"--world", "0"}, ExitCode::kUsage, {"--world is '0'", "from 1 to 1048576"});
  expect_failure({"--world", "many"}, ExitCode::kUsage, {"--world", "many"});
  expect_failure({}, ExitCode::kUsage, {"--world"});
  expect_failure({"--world", "8", "--network", "0"}, ExitCode::kUsage, {"--network"});
  expect_failure({"--world", "8", "--policy", "grads", "--set", "parallel.weight_slots=4"}, ExitCode::kUsage,
                 {"parallel.weight_slots (4)", "parallel.policy (\"grads\")"});
  expect_failure({"--world", "8", "--policy", "auto", "--set", "memory.recompute=none"}, ExitCode::kUsage,
                 {"memory.recompute", "parallel.policy (\"auto\")"});
  expect_failure({"--world", "8", "--set", "parallel.reduce_every_micro_batch=false"}, ExitCode::kUsage,
                 {"parallel.reduce_every_micro_batch", "train.grad_accumulation"});
  expect_failure({"--world", "8", "--set", "model.n_heads=12"}, ExitCode::kUsage, {"model.n_heads (12)"});
}

}  // namespace
}  // namespace minillm::test
