#include "profile/roofline.h"

#include <algorithm>

#include "cuda/check.h"
#include "kernels/cast.h"
#include "profile/meter.h"
#include "profile/shapes.h"

namespace minillm::profile {
namespace {

constexpr int64_t kCopyBytes = int64_t{1} << 30, kLeastCopyBytes = 1 << 20;
constexpr int64_t kProductSize = 8192, kLeastProductSize = 256;

/// Kernels of a timed row: enough that the events around it count for little, and few enough that the host is
/// ahead of the device for all repeats.
constexpr int kRow = 8;

Case copy_case(int64_t bytes) {
  return {
      .name = "copy",
      .cost = {.bytes = 2 * bytes},
      .buffers = {{bytes}, {bytes}},
      .run = [=](const Operands& o) {
        const auto [out, in] = o.take<2>();
        cuda::check(cudaMemcpyAsync(out, in, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, o.stream));
      }};
}

Case square_product(int64_t size, DType dtype) {
  return product_case(
      "square product", 0,
      {.m = size, .n = size, .k = size, .transpose_b = true, .input = dtype, .output = dtype});
}

Case row_of_kernels() {
  constexpr int64_t kCount = 128;  // a block's work
  return {.name = "row of kernels", .buffers = {fp32(kCount), fp32(kCount)}, .run = [](const Operands& o) {
            const auto [out, in] = o.take<2>();
            for (int i = 0; i < kRow; ++i)
              kernels::cast({.out = out, .in = in, .count = kCount, .out_type = DType::kFp32}, o.stream);
          }};
}

int64_t bytes_of(const Case& c) {
  int64_t bytes = 0;
  for (const Buffer& buffer : c.buffers) bytes += buffer.bytes;
  return bytes;
}

/// The case of the largest size that takes at most half of the free memory.
template <class MakeCase>
Case largest(int64_t size, int64_t least, const MakeCase& make) {
  while (size > least && bytes_of(make(size)) > cuda::device_capacity().free / 2) size /= 2;
  return make(size);
}

}  // namespace

double Roofline::floor_s(const Cost& cost) const {
  return std::max(static_cast<double>(cost.bytes) / copy_bytes_per_s,
                  static_cast<double>(cost.flops) / gemm_flops_per_s);
}

bool Roofline::memory_bound(const Cost& cost) const {
  return static_cast<double>(cost.bytes) / copy_bytes_per_s >=
         static_cast<double>(cost.flops) / gemm_flops_per_s;
}

Roofline measure_roofline(DType dtype, int repeats) {
  Meter meter({.repeats = repeats, .fastest_products = true});
  const Case copy = largest(kCopyBytes, kLeastCopyBytes, copy_case);
  const Case product =
      largest(kProductSize, kLeastProductSize, [&](int64_t size) { return square_product(size, dtype); });
  return {.copy_bytes_per_s = static_cast<double>(copy.cost.bytes) / meter.seconds(copy),
          .gemm_flops_per_s = static_cast<double>(product.cost.flops) / meter.seconds(product),
          .kernel_s = measure_kernel_s(repeats)};
}

double measure_kernel_s(int repeats) {
  return Meter({.repeats = repeats}).seconds(row_of_kernels()) / kRow;
}

}  // namespace minillm::profile
