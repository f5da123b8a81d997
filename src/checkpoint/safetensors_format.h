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

/// Bits of an element of any of the format's types; nothing for other names.
inline std::optional<int64_t> bits_of(std::string_view type) {
  struct Type {
    std::string_view name;
    int64_t bits;
  };
  static constexpr Type kTypes[] = {{"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
                                    {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"U16", 16},
                                    {"I16", 16}, {"F16", 16},    {"BF16", 16},   {"U32", 32},    {"I32", 32},
                                    {"F32", 32}, {"U64", 64},    {"I64", 64},    {"F64", 64},    {"C64", 64}};
  for (const Type& known : kTypes)
    if (type == known.name) return known.bits;
  return std::nullopt;
}

/// `unit` times all dimensions; nothing for a negative dimension or when that does not fit 64 bits.
inline std::optional<int64_t> product_of(const std::vector<int64_t>& shape, int64_t unit) {
  for (const int64_t dimension : shape)
    if (dimension < 0 || __builtin_mul_overflow(unit, dimension, &unit)) return std::nullopt;
  return unit;
}

/// Bytes of a tensor, likewise.
inline std::optional<int64_t> bytes_of(const std::vector<int64_t>& shape, DType dtype) {
  return product_of(shape, size_of(dtype));
}

}  // namespace minillm::checkpoint
