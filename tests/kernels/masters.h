// Master weights on the device as adamw takes them.
#pragma once

#include <bit>

#include "core/split_float.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {

/// fp32, or in two halves; `offset` elements misalign each array.
class Masters {
 public:
  Masters(const std::vector<float>& values, bool halves, int64_t offset = 0)
      : parameter_(halves ? DType::kBf16 : DType::kFp32, std::ssize(values), offset),
        lower_(DType::kBf16, halves ? std::ssize(values) : 0, offset),
        halves_(halves) {
    if (!halves) {
      parameter_.set(values);
      return;
    }
    std::vector<uint16_t> upper, lower;
    for (const float value : values) {
      const SplitFloat split = split_float(std::bit_cast<uint32_t>(value));
      upper.push_back(split.upper);
      lower.push_back(split.lower);
    }
    parameter_.write(std::as_bytes(std::span(upper)));
    lower_.write(std::as_bytes(std::span(lower)));
  }

  void* parameter(int64_t first) const {
    return halves_ ? static_cast<void*>(parameter_.as<uint16_t>() + first) : parameter_.as<float>() + first;
  }
  uint16_t* lower_half(int64_t first) const { return halves_ ? lower_.as<uint16_t>() + first : nullptr; }

  std::vector<float> values() const {
    std::vector<float> values = parameter_.values();
    if (!halves_) return values;
    const std::vector<std::byte> lower = lower_.read();
    for (size_t i = 0; i < values.size(); ++i) {
      SplitFloat halves{static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16), 0};
      std::memcpy(&halves.lower, lower.data() + i * sizeof(uint16_t), sizeof(uint16_t));
      values[i] = std::bit_cast<float>(join_float(halves));
    }
    return values;
  }
  /// What the passes read.
  std::vector<float> parameters() const { return parameter_.values(); }

 private:
  Tensor parameter_, lower_;
  bool halves_;
};

/// The bf16 that stand for masters.
inline std::vector<float> upper_halves(const std::vector<float>& masters) {
  std::vector<float> result;
  for (const float master : masters)
    result.push_back(
        std::bit_cast<float>(uint32_t{split_float(std::bit_cast<uint32_t>(master)).upper} << 16));
  return result;
}

}  // namespace minillm::kernels::testing
