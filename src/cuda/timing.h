// Times of device work whose operands are in no cache, as those of a training step are not: a run takes
// another set of operands than the one before, so many sets that the first is out of the cache again when
// its turn comes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace minillm::cuda {

/// Of the current device.
int64_t l2_cache_bytes();

/// Sets of `set_bytes` for `runs` runs: one each, or fewer that are twice the L2 cache without the one in
/// use, or as many as `room` bytes hold; at least 1. A single set for several runs is cold only if as much as
/// the cache is written between them.
int64_t cold_sets(int64_t set_bytes, int64_t runs, int64_t room);

/// Fills memory with normally distributed numbers, whether it is read as bf16 or as fp32. A GPU's clock, and
/// so the time of a product, depends on how many bits its operands flip: zeros would be the wrong thing to
/// measure. The memory starts on a multiple of 4 bytes.
void fill_with_numbers(std::span<std::byte> memory, cudaStream_t stream);

/// Seconds that each of `runs` runs takes on the device; run(i) enqueues number i on `stream`, and
/// before(i), if given, what comes between the runs and is not timed. Blocks until all are done. Work that is
/// already on the stream gives the host a lead, so that the device never waits for launches. Never 0, which a
/// clock of coarse ticks may say: speeds are computed from it.
using Run = std::function<void(int)>;
std::vector<double> time_runs(int runs, const Run& run, cudaStream_t stream, const Run& before = {});

/// The upper one of an even number. Throws InternalError for none.
double median(std::vector<double> values);

}  // namespace minillm::cuda
