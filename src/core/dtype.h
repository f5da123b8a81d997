// Element types of tensors.
#pragma once

#include <cstdint>
#include <string_view>

namespace minillm {

enum class DType : uint8_t { kFp32, kBf16 };

/// Bytes of one element.
constexpr int64_t size_of(DType type) {
  return type == DType::kFp32 ? 4 : 2;
}

/// The name used in configuration files: "fp32" or "bf16".
constexpr std::string_view name_of(DType type) {
  return type == DType::kFp32 ? "fp32" : "bf16";
}

}  // namespace minillm
