// What one training step runs on one rank, as a table: each kernel and each matrix product at its shape, how
// often, what it costs, and how to run it alone.
//
// Goals: the calls of model/ and train/, argument for argument (in place where they are), so that a time
// measured here is one of the step. Non-goals: collectives, copies between host and device, gaps between
// kernels. A test compares the table with the launches of a real step.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/checked.h"
#include "core/cost.h"
#include "core/dtype.h"
#include "cuda/gemm.h"
#include "shard/layout.h"

namespace minillm::profile {

enum class Contents : uint8_t {
  kNumbers,   ///< normally distributed, in whichever type
  kPositive,  ///< one positive number throughout, in whichever type: scales, second moments
  kIds,       ///< int32 in [0, ids)
};
struct Buffer {
  int64_t bytes = 0;
  Contents contents = Contents::kNumbers;
  int64_t ids = 0;
};

inline Buffer tensor(int64_t elements, DType type) {
  return {elements * size_of(type)};
}
inline Buffer fp32(int64_t elements) {
  return tensor(elements, DType::kFp32);
}
inline Buffer positive(int64_t elements, DType type = DType::kFp32) {
  return {elements * size_of(type), Contents::kPositive};
}
inline Buffer ids(int64_t count, int64_t limit) {
  return {count * int64_t{sizeof(int32_t)}, Contents::kIds, limit};
}

/// A pointer of the type that it is used as.
struct Address {
  std::byte* at = nullptr;
  template <class T>
  operator T*() const {  // NOLINT(google-explicit-constructor)
    return reinterpret_cast<T*>(at);
  }
};

/// What a case runs with: device memory for each of its buffers, 256-byte aligned.
struct Operands {
  std::span<const Address> buffers;
  cuda::BlasLt& blas;
  cudaStream_t stream;

  /// All buffers, to be given names: const auto [y, x] = o.take<2>();
  template <size_t N>
  std::array<Address, N> take() const {
    if (buffers.size() != N)
      throw InternalError("a case has " + std::to_string(buffers.size()) + " buffers and takes " +
                          std::to_string(N));
    std::array<Address, N> taken;
    std::copy(buffers.begin(), buffers.end(), taken.begin());
    return taken;
  }
};

struct Case {
  using Function = std::function<void(const Operands&)>;
  std::string name;
  int64_t calls = 0;  ///< in a step; 0: it is no part of one
  Cost cost = {};     ///< of a call
  std::vector<Buffer> buffers = {};
  Function run = {};                          ///< enqueues a call; may be repeated
  Function prepare = {};                      ///< if set, once before the first run: makes inputs consistent
  std::optional<cuda::GemmKey> product = {};  ///< of matrix products
};

/// All cases: those of a step of `config`, whose train.head_chunk is chosen, then those outside of it
/// (initial values, and kernels that the configuration has no use for). `layout` is that of the model over as
/// many ranks as share it.
std::vector<Case> step_cases(const config::Config& config, const shard::Layout& layout);

/// Those whose names contain a match of the regular expression `pattern` (ECMAScript). Throws UsageError for
/// a pattern that is none, or that matches no name, telling all names.
std::vector<Case> matching(std::vector<Case> cases, const std::string& pattern);

}  // namespace minillm::profile
