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
    const std::string version = " (NCCL 2.28.9)";
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
    EXPECT_EQ(gather.describe(), "gather: one rank, nothing is sent (NCCL 2.28.9)");
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
#endif

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
