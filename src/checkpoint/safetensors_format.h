// What the reader and the writer of safetensors share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace minillm::checkpoint {

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr int64_t kLengthBytes = 8;
inline constexpr int64_t kHeaderAlignment = 8;
inline constexpr int64_t kLongestHeader = 100'000'000;  ///< the reference implementation's limit

/// The name of a type in the format.
constexpr std::string_view format_name(DType dtype) {
  return dtype == DType::kFp32 ? "F32" : "BF16";
}

/// Bytes of a tensor; nothing for a negative dimension or when they do not fit 64 bits.
inline std::optional<int64_t> bytes_of(const std::vector<int64_t>& shape, DType dtype) {
  int64_t bytes = size_of(dtype);
  for (const int64_t dimension : shape)
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace minillm::checkpoint
