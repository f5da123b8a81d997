// The arena on every rank: counted, registered, used by collectives; and what happens where NCCL refuses.
#include "comm/arena.h"

#include <gtest/gtest.h>

#include <utility>

#include "core/error.h"
#include "ranks.h"
#if !defined(CUDART_VERSION)
#include "sim/control.h"
#include "sim/counters.h"
#endif

namespace minillm::comm {
namespace {

using test::job;

constexpr int64_t kCount = 1000;

float* floats(const Arena& arena, int64_t offset) {
  return reinterpret_cast<float*>(arena.data() + offset);
}

int64_t full_bytes() {
  return kCount * 4 * job()->size();
}

/// The gathers and sums of one step in an arena [full, shard]: both in place and not.
void expect_collectives_work(Communicator& gather, Communicator& reduce, const Arena& arena) {
  cuda::Stream stream;
  const int rank = job()->rank(), size = job()->size();
  float* const full = floats(arena, 0);
  float* const shard = floats(arena, full_bytes());
  const std::vector<float> mine(kCount, static_cast<float>(rank + 1));
  cuda::check(cudaMemcpy(shard, mine.data(), kCount * 4, cudaMemcpyHostToDevice));
  gather.all_gather(full, shard, kCount, DType::kFp32, stream.get());
  gather.all_gather(full, full + rank * kCount, kCount, DType::kFp32, stream.get());
  reduce.reduce_scatter(shard, full, kCount, DType::kFp32, stream.get());
  reduce.reduce_scatter(full + rank * kCount, full, kCount, DType::kFp32, stream.get());
  reduce.all_reduce(shard, kCount, stream.get());
  stream.synchronize();
  std::vector<float> values(static_cast<size_t>(kCount * size)), sums(kCount);
  cuda::check(cudaMemcpy(values.data(), full, values.size() * 4, cudaMemcpyDeviceToHost));
  cuda::check(cudaMemcpy(sums.data(), shard, sums.size() * 4, cudaMemcpyDeviceToHost));
  for (int r = 0; r < size; ++r)  // a rank's own piece of `full` holds its sum, the others what was gathered
    EXPECT_EQ(values[static_cast<size_t>(r * kCount + 7)],
              static_cast<float>(r == rank ? (r + 1) * size : r + 1));
  // What rank r holds is size * (r + 1), and the ranks are summed.
  EXPECT_EQ(sums[kCount - 1], static_cast<float>(size * size * (size + 1) / 2));
  EXPECT_EQ(gather.asynchronous_error(), "");
  EXPECT_EQ(reduce.asynchronous_error(), "");
}

class ArenaOfRanks : public ::testing::Test {
 protected:
  int64_t bytes() const { return full_bytes() + kCount * 4; }
  Communicator gather{*job(), {.name = "gather", .zero_ctas = true}};
  Communicator reduce{*job(), {.name = "reduce", .max_ctas = 16}};
};

TEST_F(ArenaOfRanks, IsCountedToTheByteAndGivenBack) {
  const int64_t before = cuda::device_bytes_in_use();
  {
    Arena arena(*job(), bytes() + 1, {&gather, &reduce});
    EXPECT_EQ(arena.bytes(), bytes() + 1);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.data()) % 256, 0u);
    EXPECT_EQ(cuda::device_bytes_in_use(), before + bytes() + 1);
    EXPECT_GE(cuda::device_bytes_peak(), before + bytes() + 1);
    expect_collectives_work(gather, reduce, arena);
    Arena moved(std::move(arena));
    EXPECT_EQ(arena.data(), nullptr);
    expect_collectives_work(gather, reduce, moved);
    moved = Arena(*job(), bytes(), {&gather, &reduce});  // two at a time, then the older one goes
    EXPECT_EQ(cuda::device_bytes_in_use(), before + bytes());
    expect_collectives_work(gather, reduce, moved);
  }
  EXPECT_EQ(cuda::device_bytes_in_use(), before);
  EXPECT_EQ(Arena().data(), nullptr);
  EXPECT_EQ(Arena(*job(), 0, {&gather}).data(), nullptr);
}

TEST_F(ArenaOfRanks, WithoutCommunicatorsIsPlainMemory) {
  const int64_t before = cuda::device_bytes_in_use();
  const Arena arena(*job(), bytes(), {nullptr, nullptr});
  EXPECT_EQ(cuda::device_bytes_in_use(), before + bytes());
  expect_collectives_work(gather, reduce, arena);
}

TEST_F(ArenaOfRanks, HasOneSizeOnAllRanks) {
  if (job()->size() == 1) GTEST_SKIP() << "for several ranks";
  try {
    const Arena arena(*job(), 5000 + job()->rank(), {&gather});
    ADD_FAILURE() << "different sizes were accepted";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("but between 5000 and " + std::to_string(4999 + job()->size()) + " over the ranks"),
              std::string::npos)
        << text;
  }
}

TEST_F(ArenaOfRanks, TooMuchIsAnErrorOfMemory) {
  const int64_t before = cuda::device_bytes_in_use();
  const int64_t total = cuda::device_capacity().total;
  EXPECT_THROW(Arena(*job(), total + 1, {&gather, &reduce}), MemoryError);
  EXPECT_EQ(cuda::device_bytes_in_use(), before);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

#if !defined(CUDART_VERSION)
/// What the two communicators describe, without their names and NCCL's version.
std::pair<std::string, std::string> paths(const Communicator& gather, const Communicator& reduce) {
  const auto path = [](const Communicator& communicator) {
    const std::string text = communicator.describe(), name = communicator.name() + ": ";
    const std::string version = " (NCCL 2.31.2)";
    EXPECT_TRUE(text.starts_with(name) && text.ends_with(version)) << text;
    return text.substr(name.size(), text.size() - name.size() - version.size());
  };
  return {path(gather), path(reduce)};
}

std::pair<std::string, std::string> without_windows(const std::string& reason) {
  return {"NCCL's kernels; no copy engines: " + reason,
          "NCCL's kernels on at most 16 CTAs; no symmetric windows: " + reason};
}

TEST_F(ArenaOfRanks, MakesTheCommunicatorsUseWindows) {
  if (job()->size() == 1) {
    EXPECT_EQ(gather.describe(), "gather: one rank, nothing is sent (NCCL 2.31.2)");
    return;
  }
  EXPECT_EQ(paths(gather, reduce), without_windows("no arena is registered"));
  {
    const int64_t allocated = sim::counters().allocated_bytes;
    const Arena arena(*job(), bytes(), {&gather, &reduce});
    EXPECT_EQ(sim::counters().allocated_bytes, allocated + std::max(bytes(), int64_t{4096}));
    const std::pair<std::string, std::string> best = {
        "copy engines in symmetric windows", "NCCL's kernels on at most 16 CTAs in symmetric windows"};
    EXPECT_EQ(paths(gather, reduce), best);
  }
  EXPECT_EQ(paths(gather, reduce), without_windows("its arena is gone"));
}

/// What NCCL refuses on the last rank only must be given up on all. (A window that one rank is refused is no
/// such case: the others wait for it in NCCL, and the watchdog ends the job.)
class Refusal {
 public:
  explicit Refusal(const char* support, bool here = last()) {
    if (here) sim::set_nccl_memory(support);
  }
  ~Refusal() { sim::set_nccl_memory("windows"); }
  static bool last() { return job()->rank() == job()->size() - 1; }
};

TEST_F(ArenaOfRanks, FallsBackOnAllRanksWhereNcclHasNoMemory) {
  const Refusal refusal("none");
  const int64_t before = cuda::device_bytes_in_use();
  {
    const Arena arena(*job(), bytes(), {&gather, &reduce});
    EXPECT_EQ(cuda::device_bytes_in_use(), before + bytes());
    expect_collectives_work(gather, reduce, arena);
    const std::string reason = Refusal::last() ? "ncclMemAlloc failed: unhandled system error: ncclMemAlloc: "
                                                 "MINILLM_SIM_NCCL_MEMORY is none"
                                               : "ncclMemAlloc failed on another rank";
    if (job()->size() > 1) {
      EXPECT_EQ(paths(gather, reduce), without_windows(reason));
    }
  }
  EXPECT_EQ(cuda::device_bytes_in_use(), before);
}

TEST_F(ArenaOfRanks, FallsBackWhereNcclRefusesTheWindow) {
  const Refusal refusal("no-windows", true);
  const Arena arena(*job(), bytes(), {&gather, &reduce});
  expect_collectives_work(gather, reduce, arena);
  if (job()->size() == 1) return;
  const auto [gather_path, reduce_path] = paths(gather, reduce);
  for (const std::string& path : {gather_path, reduce_path}) {
    EXPECT_NE(path.find("ncclCommWindowRegister failed: "), std::string::npos) << path;
    EXPECT_NE(path.find("MINILLM_SIM_NCCL_MEMORY is no-windows"), std::string::npos) << path;
  }
}

/// Local handles are no symmetric windows, which NCCL does not tell.
TEST(Arenas, OfADeviceWithoutVirtualMemoryManagementAreNoSymmetricWindow) {
  if (job()->size() == 1) GTEST_SKIP() << "for several ranks";
  const Refusal refusal("local");
  Communicator gather(*job(), {.name = "gather", .zero_ctas = true});
  Communicator reduce(*job(), {.name = "reduce", .max_ctas = 16});
  const Arena arena(*job(), 2 * full_bytes(), {&gather, &reduce});
  EXPECT_EQ(paths(gather, reduce), without_windows("a device has no virtual memory management"));
  expect_collectives_work(gather, reduce, arena);
}

/// NCCL is of another version while it lives.
class Version {
 public:
  explicit Version(const char* version) { sim::set_nccl_version(version); }
  ~Version() { sim::set_nccl_version("2.31.2"); }
};

/// On the simulated device of compute capability 9.0.
TEST(Arenas, KeepClearOfTheFaultsOfNccl) {
  const int size = job()->size();
  struct Expected {
    const char* version;
    bool kernels_in_windows, copies_of_two;
  };
  for (const auto& [version, kernels_in_windows, copies_of_two] : {Expected{"2.28.9", false, true},
                                                                   {"2.29.7", false, false},
                                                                   {"2.30.6", false, false},
                                                                   {"2.30.7", true, false},
                                                                   {"2.31.1", true, false},
                                                                   {"2.31.2", true, true}}) {
    SCOPED_TRACE(version);
    const Version faulty(version);
    const bool copies = size != 2 || copies_of_two;
    sim::reset_counters();
    Communicator gather(*job(), {.name = "gather", .zero_ctas = true});
    Communicator reduce(*job(), {.name = "reduce"});
    const Arena arena(*job(), 2 * full_bytes(), {&gather, &reduce});
    sim::Counters counters = sim::counters();
    EXPECT_EQ(counters.communicators["gather"].cta_policy,
              copies ? NCCL_CTA_POLICY_ZERO : NCCL_CONFIG_UNDEF_INT);
    EXPECT_EQ(counters.windows["gather"], size > 1 && (copies || kernels_in_windows));
    EXPECT_EQ(counters.windows["reduce"], size > 1 && kernels_in_windows);
    if (size > 1) {
      EXPECT_EQ(gather.describe().starts_with("gather: copy engines in symmetric windows"), copies)
          << gather.describe();
      EXPECT_EQ(reduce.describe().starts_with("reduce: NCCL's kernels in symmetric windows"),
                kernels_in_windows)
          << reduce.describe();
    }
    expect_collectives_work(gather, reduce, arena);
  }
}

/// The first pair of ranks shares a node, the second does not: one group wants a window and the other none.
TEST(Arenas, MayBeAWindowOfOneGroupAndNotOfAnother) {
  if (job()->size() != 4) GTEST_SKIP() << "for four ranks";
  const Version faulty("2.28.9");
  setenv("NCCL_HOSTID", job()->rank() == 3 ? "b" : "a", 1);
  sim::reset_counters();
  Communicator gather(*job(),
                      {.name = "gather", .group = shard_group(job()->rank(), 4, 2), .zero_ctas = true});
  unsetenv("NCCL_HOSTID");
  const Arena arena(*job(), full_bytes(), {&gather});
  const bool copies = job()->rank() < 2;
  EXPECT_EQ(sim::counters().windows["gather"], copies);
  EXPECT_EQ(gather.describe(),
            copies
                ? "gather: copy engines in symmetric windows (NCCL 2.28.9)"
                : "gather: NCCL's kernels; no copy engines: the ranks are on 2 nodes, they have to be on one "
                  "(NCCL 2.28.9)");
}
#endif

TEST(Arenas, ACommunicatorForCopyEnginesMakesNoSums) {
  Communicator gather(*job(), {.name = "gather", .zero_ctas = true});
  const Arena arena(*job(), 2 * full_bytes(), {&gather});
  const cuda::Stream stream;
  EXPECT_THROW(gather.all_reduce(floats(arena, 0), 1, stream.get()), InternalError);
  EXPECT_THROW(gather.reduce_scatter(floats(arena, 0), floats(arena, 0), 1, DType::kFp32, stream.get()),
               InternalError);
}

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
