#include "kernels/silu.h"

#include "kernels/device/tiling.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

// Below, at and above a vector and a block's tile (8192 elements of bf16 forward), odd and even.
constexpr int64_t kCounts[] = {0, 1, 7, 8, 33, 1025, 4096, 8191, 8192, 8193, 4096 * 5 + 5};

std::vector<double> silu_reference(const std::vector<float>& u) {
  std::vector<double> y;
  for (const double v : u) y.push_back(v / (1 + std::exp(-v)));
  return y;
}

std::vector<float> silu_plain(const std::vector<float>& u) {
  std::vector<float> y;
  for (const float v : u) y.push_back(v / (1 + std::exp(-v)));
  return y;
}

template <class Real>
std::vector<Real> silu_backward_loop(const std::vector<float>& dy, const std::vector<float>& u) {
  std::vector<Real> du;
  for (size_t i = 0; i < u.size(); ++i) {
    const Real v = u[i], s = 1 / (1 + std::exp(-v));
    du.push_back(dy[i] * s * (1 + v * (1 - s)));
  }
  return du;
}

void run_forward(const Tensor& y, const Tensor& u, int64_t count) {
  silu_forward({.y = y.data(), .u = u.data(), .count = count, .dtype = u.type()}, nullptr);
}

void run_backward(const Tensor& du, const Tensor& dy, const Tensor& u, int64_t count) {
  silu_backward({.du = du.data(), .dy = dy.data(), .u = u.data(), .count = count, .dtype = u.type()},
                nullptr);
}

TEST(Silu, ForwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const int64_t count : kCounts)
      for (const int64_t offset : {0, 1, 2}) {  // elements and 4-byte words
        const std::vector<float> values = rounded(normal_values(count, 1, 4), type);
        const Tensor u(type, values, offset), y(type, count, offset);
        run_forward(y, u, count);
        expect_close("y", y.values(), silu_reference(values), silu_plain(values), type);
        expect_rounded_once("y", y.values(), silu_reference(values), type);
      }
}

TEST(Silu, BackwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const int64_t count : kCounts)
      for (const int64_t offset : {0, 1, 2}) {
        const std::vector<float> dy_values = rounded(normal_values(count, 2), type);
        const std::vector<float> values = rounded(normal_values(count, 3, 4), type);
        const Tensor dy(type, dy_values), u(type, values, offset), du(type, count);
        run_backward(du, dy, u, count);
        // The derivative crosses zero at u = -1.28, where its two terms cancel.
        std::vector<double> magnitude;
        for (int64_t i = 0; i < count; ++i) {
          const double v = values[i], s = 1 / (1 + std::exp(-v));
          magnitude.push_back(std::abs(dy_values[i]) * s * (1 + std::abs(v) * (1 - s)));
        }
        expect_close("du", du.values(), silu_backward_loop<double>(dy_values, values),
                     silu_backward_loop<float>(dy_values, values), type, magnitude);
        expect_rounded_once("du", du.values(), silu_backward_loop<double>(dy_values, values), type);
      }
}

TEST(Silu, InPlaceGivesTheSameBits) {
  for (const DType type : kAllTypes) {
    constexpr int64_t kCount = 1025;
    const std::vector<float> values = normal_values(kCount, 4), dy_values = normal_values(kCount, 5);
    const Tensor u(type, values), y(type, kCount), in_place(type, values);
    run_forward(y, u, kCount);
    run_forward(in_place, in_place, kCount);
    expect_same_bits("y over u", y.read(), in_place.read());

    const Tensor dy(type, dy_values), du(type, kCount), over_dy(type, dy_values);
    run_backward(du, dy, u, kCount);
    run_backward(over_dy, over_dy, u, kCount);
    expect_same_bits("du over dy", du.read(), over_dy.read());
    const Tensor over_u(type, values);
    run_backward(over_u, dy, over_u, kCount);
    expect_same_bits("du over u", du.read(), over_u.read());
  }
}

TEST(Silu, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {NAN, infinity, 0.0f, -0.0f, 1e30f, -200.0f};
  for (const DType type : kAllTypes) {
    const Tensor u(type, values), y(type, std::ssize(values));
    run_forward(y, u, std::ssize(values));
    const std::vector<float> result = y.values();
    EXPECT_TRUE(std::isnan(result[0]));
    EXPECT_EQ(result[1], infinity);
    EXPECT_EQ(result[2], 0);
    EXPECT_EQ(result[3], 0);
    EXPECT_EQ(result[4], rounded(1e30f, type));
    EXPECT_EQ(result[5], 0) << "exp(200) overflows to infinity; the quotient must still be 0";
  }
}

// Each tensor misaligned alone: its neighbours in the 16 bytes are guard bytes, and results must not change.
TEST(Silu, Trap05_MisalignedViews) {
  constexpr int64_t kCount = 8200;
  for (const DType type : kAllTypes) {
    const std::vector<float> values = normal_values(kCount, 8), dy_values = normal_values(kCount, 9);
    const Tensor dy(type, dy_values), u(type, values), du(type, kCount);
    run_backward(du, dy, u, kCount);
    for (int misaligned = 0; misaligned < 3; ++misaligned)
      for (const int64_t offset : {1, 2, 4}) {
        const Tensor other_dy(type, dy_values, misaligned == 0 ? offset : 0);
        const Tensor other_u(type, values, misaligned == 1 ? offset : 0);
        const Tensor other_du(type, kCount, misaligned == 2 ? offset : 0);
        run_backward(other_du, other_dy, other_u, kCount);
        expect_same_bits("du", du.read(), other_du.read());
      }
  }
}

// Positions of the vectors of an array of more than 2^31 elements, of which the last block has only a part.
TEST(Silu, Trap01_PositionsBeyond32Bits) {
  constexpr int64_t kCount = (int64_t{1} << 33) + 12345;
  constexpr int kThreads = 256, kVectors = 4, kWidth = 8, kTile = kThreads * kVectors * kWidth;
  const unsigned blocks = blocks_for(kCount, kTile);
  EXPECT_EQ(blocks, (int64_t{1} << 20) + 2);
  for (const int64_t block : {int64_t{0}, int64_t{1} << 18, int64_t{blocks} - 1})
    for (const int k : {0, kVectors - 1})
      for (const uint32_t thread : {0u, kThreads - 1u}) {
        const int64_t expected = block * kTile + (int64_t{k} * kThreads + thread) * kWidth;
        EXPECT_EQ(first_element(block, thread, kThreads, k, kVectors, kWidth), expected);
      }
  EXPECT_LT(static_cast<int32_t>((int64_t{1} << 18) * kTile), 0)
      << "32 bits would do: the test shows nothing";
  EXPECT_THROW(blocks_for(int64_t{1} << 45, kTile), InternalError);
}

TEST(Silu, Repeatable) {
  constexpr int64_t kCount = 3000;
  const Tensor u(DType::kBf16, normal_values(kCount, 6)), dy(DType::kBf16, normal_values(kCount, 7));
  expect_repeatable("silu_backward", [&] {
    const Tensor du(DType::kBf16, kCount);
    run_backward(du, dy, u, kCount);
    return du.read();
  });
}

TEST(Silu, Cost) {
  EXPECT_EQ(silu_forward_cost(10, DType::kBf16).bytes, 40);
  EXPECT_EQ(silu_backward_cost(10, DType::kFp32).bytes, 120);
}

}  // namespace
}  // namespace minillm::kernels::testing
