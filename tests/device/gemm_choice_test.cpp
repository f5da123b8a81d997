// Choices of algorithms: timed once, without touching a product's operands, kept in a file that is never
// trusted.
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <regex>

#include "core/error.h"
#include "cuda/gemm_cache.h"
#include "gemm_fixture.h"
#include "tests/unit/errors.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::cuda {
namespace {

using test::expect_error;
using test::TemporaryFolder;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Operands of a few shapes, a BlasLt that has run them, and scratch for tuning.
class Choices : public ::testing::Test {
 protected:
  struct Product {
    Case t;
    Operand a, b, d, bias;
    Product(const Case& t, std::mt19937& random)
        : t(t),
          a(t.input, t.m * t.k, t.offset, random),
          b(t.input, t.k * t.n, t.offset, random),
          d(t.output, t.m * t.n, t.offset, random),
          bias(t.output, t.n, t.offset, random) {}
  };

  Choices() {
    std::mt19937 random(17);
    Case plain{64, 96, 128, DType::kBf16, DType::kBf16, false, true};
    Case summed{48, 40, 300, DType::kBf16, DType::kFp32, true, false, 1};
    Case odd{17, 33, 65, DType::kFp32, DType::kFp32, false, false};
    summed.c_is_d = true;
    odd.bias = true;
    odd.offset = 1;
    for (const Case& t : {plain, summed, odd}) products_.emplace_back(t, random);
  }

  std::vector<std::vector<std::byte>> run(Fixture& fixture) {
    std::vector<std::vector<std::byte>> results;
    for (Product& p : products_) {
      fixture.blas().run(fixture.gemm(p.t, p.a, p.b, p.d, p.d, p.bias), fixture.stream().get());
      fixture.stream().synchronize();
      results.push_back(p.d.download());
    }
    return results;
  }

  bool choose(Fixture& fixture, GemmCache& cache) {
    lines_.clear();
    return choose_gemms(fixture.blas(), cache, scratch(), fixture.stream().get(),
                        [this](const std::string& line) { lines_.push_back(line); });
  }

  int lines_with(const std::string& part) const {
    return static_cast<int>(std::ranges::count_if(
        lines_, [&](const std::string& line) { return line.find(part) != std::string::npos; }));
  }

  std::span<std::byte> scratch() const { return {memory_.data(), static_cast<size_t>(memory_.bytes())}; }

  std::vector<Product> products_;
  DeviceMemory memory_{BlasLt::workspace_bytes() + (8 << 20)};
  std::vector<std::string> lines_;
};

TEST_F(Choices, PersistInAFile) {
  const TemporaryFolder folder;
  const std::string path = folder.path("choices.json");
  Fixture one, two;
  run(one);
  GemmCache cache;
  EXPECT_TRUE(choose(one, cache));
  EXPECT_EQ(lines_.size(), 3u);
  EXPECT_EQ(lines_with("(from gemm.cache)"), 0);
  const std::regex line(
      R"(gemm D\[64,96\] bf16 = .*: candidate \d+ of \d+, \d+\.\d us, \d+\.\d TFLOPS; .*\d us)");
  EXPECT_TRUE(std::regex_match(lines_[0], line)) << lines_[0];
  write_gemm_cache(path, cache);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path("")), {}), 1)
      << "temporary files stay";

  run(two);
  GemmCache again = read_gemm_cache(path, [](const std::string& text) { ADD_FAILURE() << text; });
  EXPECT_EQ(to_json(again), to_json(cache));
  EXPECT_FALSE(choose(two, again)) << "timed what the file knows";
  EXPECT_EQ(lines_with("(from gemm.cache)"), 3);
  products_[1].t.beta = 0;  // or the two sums would start from different values
  EXPECT_EQ(run(one), run(two));
}

TEST_F(Choices, ANewShapeIsAddedToTheFile) {
  Fixture fixture;
  run(fixture);
  GemmCache cache;
  choose(fixture, cache);
  std::mt19937 random(19);
  products_.emplace_back(Case{8, 8, 8, DType::kBf16, DType::kBf16, false, false}, random);
  run(fixture);
  EXPECT_TRUE(choose(fixture, cache));
  EXPECT_EQ(lines_with("(from gemm.cache)"), 3);
  EXPECT_EQ(lines_with("gemm D[8,8]"), 1);
  EXPECT_EQ(cache.at(gemm_device()).size(), 4u);
}

TEST_F(Choices, OfOtherDevicesAreKeptAndNotUsed) {
  Fixture one, two;
  run(one), run(two);
  GemmCache known;
  choose(one, known);
  std::vector<GemmDevice> others(4, gemm_device());
  others[0].name += " Ti";
  others[1].multiprocessors += 1;
  others[2].driver += 1;
  others[3].blas += 1;
  GemmCache cache;
  for (const GemmDevice& other : others) cache[other] = known.at(gemm_device());
  EXPECT_TRUE(choose(two, cache));
  EXPECT_EQ(lines_with("(from gemm.cache)"), 0);
  EXPECT_EQ(cache.size(), 5u);
  EXPECT_EQ(parse_gemm_cache(to_json(cache), "c.json"), cache);
}

TEST_F(Choices, CorruptFilesAreReportedInOneLineAndReplaced) {
  const TemporaryFolder folder;
  Fixture fixture;
  run(fixture);
  GemmCache cache;
  choose(fixture, cache);
  const std::string good = to_json(cache);
  const auto changed = [&good](const std::string& from, const std::string& to) {
    const size_t at = good.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return good.substr(0, at) + to + good.substr(at + from.size());
  };
  for (const std::string& text :
       {std::string(), std::string("{}"), std::string("[1]"), good.substr(0, good.size() / 2),
        changed("\"format\": 1", "\"format\": 2"), changed("\"m\": ", "\"m\": -"), changed("\"k\"", "\"kk\""),
        changed("\"transpose_a\": ", "\"transpose_a\": 1, \"x\": "), changed("\"fp32\"", "\"fp16\""),
        changed("256,", "24,"), changed("256,", "-1,"),
        changed("\"candidates\": ", "\"candidates\": 0, \"x\": "),
        changed("\"candidate\": ", "\"candidate\": 99, \"x\": "), changed("\"seconds\": ", "\"seconds\": -"),
        changed("\"algorithm\": \"", "\"algorithm\": \"0"),
        changed("\"algorithm\": \"0", "\"algorithm\": \"g")}) {
    const std::string path = folder.write("choices.json", text);
    std::vector<std::string> reports;
    EXPECT_EQ(read_gemm_cache(path, [&](const std::string& line) { reports.push_back(line); }), GemmCache{});
    ASSERT_EQ(reports.size(), 1u) << text;
    EXPECT_NE(reports[0].find(path), std::string::npos) << reports[0];
    EXPECT_EQ(reports[0].find('\n'), std::string::npos) << reports[0];
    write_gemm_cache(path, cache);
    EXPECT_EQ(folder.read("choices.json"), good);
  }
}

TEST_F(Choices, FilesThatCannotBeReadOrWritten) {
  const TemporaryFolder folder;
  const auto unexpected = [](const std::string& text) { ADD_FAILURE() << text; };
  EXPECT_TRUE(read_gemm_cache(folder.path("absent.json"), unexpected).empty());
  const std::string below_a_file = folder.write("file", "") + "/choices.json";
  expect_error<InputError>([&] { read_gemm_cache(below_a_file, unexpected); },
                           {"gemm.cache", below_a_file, "read"});
  expect_error<InputError>([&] { write_gemm_cache(below_a_file, {}); }, {"gemm.cache", below_a_file});
  expect_error<InputError>([&] { write_gemm_cache(folder.path("absent/c.json"), {}); }, {"No such file"});
}

TEST_F(Choices, TimingTouchesNothingButItsScratch) {
  Fixture fixture;
  constexpr int64_t kGuard = 4096;
  const std::vector<std::vector<std::byte>> before = run(fixture);
  for (const GemmKey& key : fixture.blas().shapes()) {
    const DeviceMemory guarded(2 * kGuard + BlasLt::tune_bytes(key));
    check(cudaMemset(guarded.data(), 0xa5, static_cast<size_t>(guarded.bytes())));
    check(cudaStreamSynchronize(nullptr));
    const auto bytes = static_cast<size_t>(BlasLt::tune_bytes(key));
    expect_error<InternalError>(
        [&] {
          fixture.blas().tune(key, {guarded.data() + kGuard, bytes - 1}, fixture.stream().get());
        },
        {"scratch memory of " + std::to_string(bytes) + " bytes", std::to_string(bytes - 1)});
    fixture.blas().tune(key, {guarded.data() + kGuard, bytes}, fixture.stream().get());
    std::vector<std::byte> all(static_cast<size_t>(guarded.bytes()));
    check(cudaMemcpy(all.data(), guarded.data(), all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(all[i], std::byte{0xa5}) << describe(key) << " byte " << i;
      ASSERT_EQ(all[all.size() - 1 - i], std::byte{0xa5}) << describe(key) << " byte " << i;
    }
  }
  for (size_t i = 0; i < products_.size(); ++i) EXPECT_EQ(products_[i].d.download(), before[i]) << i;
}

TEST_F(Choices, SumsWithBetaAreRightWithTheChosenAlgorithm) {
  Fixture fixture;
  Case t{48, 40, 300, DType::kBf16, DType::kFp32, true, false, 1};
  t.c_is_d = true;
  fixture.compare(t);
  GemmCache cache;
  choose(fixture, cache);
  fixture.compare(t);
  EXPECT_EQ(fixture.blas().shapes().size(), 1u);
}

TEST_F(Choices, AnotherRankFollows) {
  Fixture one, two;
  run(one), run(two);
  GemmCache cache;
  choose(one, cache);
  const std::string bytes = to_json(cache);
  adopt_gemms(two.blas(), parse_gemm_cache(bytes, "rank 0"));
  GemmCache own;
  EXPECT_TRUE(choose(two, own));  // tune() of a shape with a choice gives that choice
  EXPECT_EQ(to_json(own), bytes);

  GemmCache incomplete = cache;
  incomplete.at(gemm_device()).erase(one.blas().shapes()[1]);
  expect_error<DeviceError>([&] { adopt_gemms(two.blas(), incomplete); }, {"gemm D[48,40]", "no choice"});
  GemmDevice other = gemm_device();
  other.name = "Another GPU";
  expect_error<UsageError>(
      [&] {
        adopt_gemms(two.blas(), {{other, cache.at(gemm_device())}});
      },
      {"gemm.deterministic", "Another GPU (", gemm_device().name});
}

TEST(GemmChoice, TheFirstCandidateStaysUnlessAnotherIsClearlyFaster) {
  const auto fastest = [](std::vector<double> seconds) { return fastest_candidate(seconds); };
  EXPECT_EQ(fastest({100}), 0);
  EXPECT_EQ(fastest({100, 99, 101}), 0);
  EXPECT_EQ(fastest({100, 97, 98}), 1);
  EXPECT_EQ(fastest({100, 99, 97}), 2);
  EXPECT_EQ(fastest({kInfinite, 100, 99}), 1);
  EXPECT_EQ(fastest({kInfinite, 100, 90}), 2);
  EXPECT_EQ(fastest({kInfinite, kInfinite}), -1);
  EXPECT_EQ(fastest({}), -1);
}

TEST(GemmChoice, EveryPartOfAShapeIsPartOfItsKey) {
  Fixture fixture;
  std::mt19937 random(23);
  const Operand a(DType::kBf16, 64, 0, random), b(DType::kBf16, 64, 0, random),
      d(DType::kFp32, 64, 0, random);
  const Case t{8, 8, 8, DType::kBf16, DType::kFp32, false, false};
  const Gemm plain = fixture.gemm(t, a, b, d, d, d);
  std::vector<Gemm> gemms(8, plain);
  gemms[1].transpose_a = true;
  gemms[2].transpose_b = true;
  gemms[3].beta = 0.5f;
  gemms[4].bias = b.data();
  gemms[5].m = 4;
  gemms[6].n = 4, gemms[6].a = static_cast<std::byte*>(a.data()) + 2, gemms[6].m = 4;
  gemms[7].k = 4;
  for (const Gemm& gemm : gemms) fixture.blas().run(gemm, fixture.stream().get());
  gemms[3].beta = 2;  // the same: an algorithm does not depend on the value
  for (const Gemm& gemm : gemms) fixture.blas().run(gemm, fixture.stream().get());
  fixture.stream().synchronize();
  EXPECT_EQ(fixture.blas().shapes().size(), gemms.size());
  EXPECT_EQ(fixture.blas().shapes()[6].align_a, 2u);
  EXPECT_TRUE(fixture.blas().shapes()[3].accumulate);
}

}  // namespace
}  // namespace minillm::cuda
