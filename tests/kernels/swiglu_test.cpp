#include "kernels/swiglu.h"

#include "kernels/device/tiling.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

struct Shape {
  int64_t rows;
  int columns;
  int64_t elements() const { return rows * columns; }
};

constexpr int64_t kManyRows = kThreadSanitized ? 199 : 8191;

// Rows shorter and longer than a block's tile of 512 vectors, cut into vectors, words and elements.
constexpr Shape kShapes[] = {{0, 8},    {1, 1},    {1, 7},         {7, 33},        {199, 7},   {199, 24},
                             {3, 1025}, {2, 4096}, {kManyRows, 8}, {kManyRows, 3}, {5, 10'002}};

/// Values of [rows, 2 · columns] or [rows, columns] that are not all of one size.
std::vector<float> gate_up_values(const Shape& s, DType type, uint32_t seed) {
  return rounded(normal_values(2 * s.elements(), seed, 3), type);
}

template <class Real>
std::vector<Real> forward_loop(const Shape& s, const std::vector<float>& gate_up) {
  std::vector<Real> h;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int c = 0; c < s.columns; ++c) {
      const Real gate = gate_up[r * 2 * s.columns + c], up = gate_up[r * 2 * s.columns + s.columns + c];
      h.push_back(gate / (1 + std::exp(-gate)) * up);
    }
  return h;
}

template <class Real>
std::vector<Real> backward_loop(const Shape& s, const std::vector<float>& dh,
                                const std::vector<float>& gate_up, bool absolute = false) {
  std::vector<Real> result(2 * s.elements());
  for (int64_t r = 0; r < s.rows; ++r)
    for (int c = 0; c < s.columns; ++c) {
      const int64_t at = r * 2 * s.columns + c;
      const Real gate = gate_up[at], up = gate_up[at + s.columns], d = dh[r * s.columns + c];
      const Real sigmoid = 1 / (1 + std::exp(-gate));
      // The derivative crosses zero at gate = -1.28, where its two terms cancel.
      const Real slope = sigmoid * (1 + (absolute ? std::abs(gate) : gate) * (1 - sigmoid));
      result[at] = d * up * slope;
      result[at + s.columns] = d * gate * sigmoid;
    }
  return result;
}

void run_forward(const Shape& s, const Tensor& h, const Tensor& gate_up) {
  swiglu_forward({.h = h.data(),
                  .gate_up = gate_up.data(),
                  .rows = s.rows,
                  .columns = s.columns,
                  .dtype = gate_up.type()},
                 nullptr);
}

void run_backward(const Shape& s, const Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up,
                  void* h = nullptr) {
  swiglu_backward({.dgate_up = dgate_up.data(),
                   .dh = dh.data(),
                   .gate_up = gate_up.data(),
                   .h = h,
                   .rows = s.rows,
                   .columns = s.columns,
                   .dtype = gate_up.type()},
                  nullptr);
}

std::string name_of_shape(const Shape& s) {
  return std::to_string(s.rows) + " x " + std::to_string(s.columns);
}

TEST(Swiglu, ForwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape& s : kShapes)
      for (const int64_t offset : {0, 1, 2}) {
        const std::vector<float> values = gate_up_values(s, type, 1);
        const Tensor gate_up(type, values, offset), h(type, s.elements(), offset);
        run_forward(s, h, gate_up);
        const std::vector<double> reference = forward_loop<double>(s, values);
        expect_close(name_of_shape(s), h.values(), reference, forward_loop<float>(s, values), type);
        expect_rounded_once(name_of_shape(s), h.values(), reference, type);
      }
}

TEST(Swiglu, BackwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape& s : kShapes)
      for (const int64_t offset : {0, 1, 2}) {
        const std::vector<float> values = gate_up_values(s, type, 2);
        const std::vector<float> dh_values = rounded(normal_values(s.elements(), 3), type);
        const Tensor gate_up(type, values, offset), dh(type, dh_values), dgate_up(type, 2 * s.elements());
        run_backward(s, dgate_up, dh, gate_up);
        const std::vector<double> reference = backward_loop<double>(s, dh_values, values);
        std::vector<double> magnitude = backward_loop<double>(s, dh_values, values, true);
        for (double& m : magnitude) m = std::abs(m);
        expect_close(name_of_shape(s), dgate_up.values(), reference,
                     backward_loop<float>(s, dh_values, values), type, magnitude);
        expect_rounded_once(name_of_shape(s), dgate_up.values(), reference, type);
      }
}

TEST(Swiglu, BackwardGivesTheForwardOutputAgain) {
  const Shape s = {9, 40};
  for (const DType type : kAllTypes) {
    const Tensor gate_up(type, gate_up_values(s, type, 4)), h(type, s.elements());
    run_forward(s, h, gate_up);
    const Tensor dh(type, normal_values(s.elements(), 5)), dgate_up(type, 2 * s.elements());
    const Tensor h_again(type, s.elements()), without_h(type, 2 * s.elements());
    run_backward(s, without_h, dh, gate_up);
    run_backward(s, dgate_up, dh, gate_up, h_again.data());
    expect_same_bits("h", h.read(), h_again.read());
    expect_same_bits("dgate_up", without_h.read(), dgate_up.read());
  }
}

TEST(Swiglu, InPlaceGivesTheSameBits) {
  for (const Shape& s : {Shape{9, 40}, Shape{7, 33}, Shape{3, 5000}})
    for (const DType type : kAllTypes) {
      const std::vector<float> values = gate_up_values(s, type, 6),
                               dh_values = normal_values(s.elements(), 7);
      const Tensor gate_up(type, values), dh(type, dh_values), dgate_up(type, 2 * s.elements());
      const Tensor h(type, s.elements()), over_gate_up(type, values), over_dh(type, dh_values);
      run_backward(s, dgate_up, dh, gate_up, h.data());
      run_backward(s, over_gate_up, over_dh, over_gate_up, over_dh.data());
      expect_same_bits("dgate_up over gate_up", dgate_up.read(), over_gate_up.read());
      expect_same_bits("h over dh", h.read(), over_dh.read());
    }
}

// Each tensor misaligned alone, and rows of an odd number of elements beside rows of whole words.
TEST(Swiglu, Trap05_MisalignedViews) {
  for (const DType type : kAllTypes) {
    const Shape s = {5, 104};
    const std::vector<float> values = gate_up_values(s, type, 10),
                             dh_values = normal_values(s.elements(), 11);
    const Tensor gate_up(type, values), dh(type, dh_values), dgate_up(type, 2 * s.elements());
    const Tensor h(type, s.elements());
    run_backward(s, dgate_up, dh, gate_up, h.data());
    for (int misaligned = 0; misaligned < 4; ++misaligned)
      for (const int64_t offset : {1, 2, 4}) {
        const auto of = [&](int tensor) { return tensor == misaligned ? offset : 0; };
        const Tensor other_gate_up(type, values, of(0)), other_dh(type, dh_values, of(1));
        const Tensor other_dgate_up(type, 2 * s.elements(), of(2)), other_h(type, s.elements(), of(3));
        run_backward(s, other_dgate_up, other_dh, other_gate_up, other_h.data());
        expect_same_bits("dgate_up", dgate_up.read(), other_dgate_up.read());
        expect_same_bits("h", h.read(), other_h.read());
        run_forward(s, other_h, other_gate_up);
        expect_same_bits("h forward", h.read(), other_h.read());
      }
  }
}

TEST(Swiglu, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const Shape s = {1, 5};
  for (const DType type : kAllTypes) {
    const Tensor gate_up(type, std::vector<float>{NAN, infinity, 0.0f, 1e30f, -200.0f, 1, 1, 1, 1, 1});
    const Tensor h(type, s.elements()), dh(type, std::vector<float>(5, 1.0f)), dgate_up(type, 10);
    run_forward(s, h, gate_up);
    run_backward(s, dgate_up, dh, gate_up);
    const std::vector<float> result = h.values(), gradient = dgate_up.values();
    EXPECT_TRUE(std::isnan(result[0]));
    EXPECT_EQ(result[1], infinity);
    EXPECT_EQ(result[2], 0);
    EXPECT_EQ(result[3], rounded(1e30f, type));
    EXPECT_EQ(result[4], 0) << "exp(200) overflows to infinity; the quotient must still be 0";
    EXPECT_TRUE(std::isnan(gradient[0]));
    EXPECT_EQ(gradient[2], 0.5f);
    EXPECT_EQ(gradient[3], 1);
    EXPECT_EQ(gradient[4], 0);
    EXPECT_EQ(gradient[9], 0) << "of up: silu(-200)";
  }
}

// 80,000 tokens of a model with 36,864 columns: the offset of a row in [rows, 2 · columns] passes 2^31 long
// before the last row, and so does the number of a vector.
TEST(Swiglu, Trap01_PositionsBeyond32Bits) {
  constexpr int64_t kRows = 80'000, kColumns = 36'864, kPerBlock = 512;
  for (const int width : {8, 2, 1}) {
    const Divisor per_row(static_cast<uint32_t>(kColumns / width));
    const int64_t vectors = kRows * per_row.value();
    for (const int64_t index : {int64_t{0}, vectors / 2, vectors - 1}) {
      const int64_t block = index / kPerBlock;
      const RowVector origin = row_vector(block * kPerBlock, per_row);
      const RowVector at = row_vector_after(origin, static_cast<uint32_t>(index % kPerBlock), per_row);
      EXPECT_EQ(at.row, index / per_row.value());
      EXPECT_EQ(at.vector, index % per_row.value());
    }
    const RowVector last = row_vector(vectors - 1, per_row);
    const int64_t offset = last.row * 2 * kColumns + last.vector * width;
    EXPECT_EQ(offset, kRows * 2 * kColumns - kColumns - width);
    EXPECT_NE(offset, static_cast<int32_t>(offset)) << "32 bits would do: the test shows nothing";
  }
}

TEST(Swiglu, DivisionByMultiplicationIsExact) {
  constexpr uint32_t kLargest = (uint32_t{1} << 31) - 1;
  for (const uint32_t d :
       {1u, 2u, 3u, 5u, 7u, 641u, 704u, 1024u, 65'537u, (1u << 30) - 1, 1u << 30, kLargest}) {
    const Divisor divisor(d);
    for (const uint32_t multiple : {0u, 1u, 2u, kLargest / d / 2, kLargest / d})
      for (const int64_t near : {-1, 0, 1}) {
        const int64_t n = int64_t{multiple} * d + near;
        if (n < 0 || n > kLargest) continue;
        EXPECT_EQ(divisor.quotient(static_cast<uint32_t>(n)), n / d) << n << " / " << d;
      }
    EXPECT_EQ(divisor.quotient(kLargest), kLargest / d);
  }
}

TEST(Swiglu, Repeatable) {
  const Shape s = {7, 120};
  const Tensor gate_up(DType::kBf16, gate_up_values(s, DType::kBf16, 8));
  const Tensor dh(DType::kBf16, normal_values(s.elements(), 9));
  expect_repeatable("swiglu_backward", [&] {
    const Tensor dgate_up(DType::kBf16, 2 * s.elements());
    run_backward(s, dgate_up, dh, gate_up);
    return dgate_up.read();
  });
}

TEST(Swiglu, Cost) {
  constexpr int64_t kRows = int64_t{1} << 20;
  EXPECT_EQ(swiglu_forward_cost(kRows, 1 << 14, DType::kBf16).bytes, 3 * kRows * (1 << 14) * 2);
  EXPECT_EQ(swiglu_backward_cost(kRows, 1 << 14, DType::kBf16).bytes, 5 * kRows * (1 << 14) * 2);
  EXPECT_EQ(swiglu_backward_cost(kRows, 1 << 14, DType::kFp32, true).bytes, 6 * kRows * (1 << 14) * 4);
}

}  // namespace
}  // namespace minillm::kernels::testing
