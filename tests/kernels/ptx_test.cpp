#include <numeric>

#include "tests/kernels/ptx_kernels.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

/// Small integers: exact in bf16, and so are their products' sums in fp32.
std::vector<float> integers(int count, uint32_t seed, int largest) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> distribution(-largest, largest);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(distribution(generator));
  return values;
}

/// [m, k] · [k, n], b given as [n, k] unless `b_by_rows`.
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, int n, bool b_by_rows) {
  constexpr int kDepth = 16;
  std::vector<float> d(a.size() / kDepth * n);
  for (int i = 0; i < std::ssize(a) / kDepth; ++i)
    for (int j = 0; j < n; ++j)
      for (int k = 0; k < kDepth; ++k)
        d[i * n + j] += a[i * kDepth + k] * (b_by_rows ? b[k * n + j] : b[j * kDepth + k]);
  return d;
}

TEST(Ptx, FragmentsOfAProduct) {
  const std::vector<float> a = integers(16 * 16, 1, 100), b = integers(16 * 8, 2, 100);
  const Tensor device_a(DType::kBf16, a), device_b(DType::kBf16, b);
  for (const bool b_by_rows : {false, true})
    for (const Load load : {Load::kOne, Load::kTwo, Load::kFour}) {
      const DeviceArray<float> d(16 * 8);
      warp_product(d.get(), device_a.data(), device_b.data(), b_by_rows, load);
      EXPECT_EQ(d.values(), product(a, b, 8, b_by_rows))
          << "b_by_rows " << b_by_rows << " load " << static_cast<int>(load);
    }
}

// Entries of 1, 2, 4 in a, b, c: every inner product up to 256 is exact in bf16.
TEST(Ptx, TwoFragmentsOfAProductAreAnOperand) {
  const std::vector<float> a = integers(16 * 16, 3, 1), b = integers(16 * 16, 4, 4),
                           c = integers(16 * 8, 5, 9);
  const Tensor device_a(DType::kBf16, a), device_b(DType::kBf16, b), device_c(DType::kBf16, c);
  const DeviceArray<float> d(16 * 8);
  chained_product(d.get(), device_a.data(), device_b.data(), device_c.data());
  EXPECT_EQ(d.values(), product(product(a, b, 16, false), c, 8, true));
}

std::vector<uint4> numbered_words(int count) {
  std::vector<uint4> words(count);
  for (uint32_t i = 0; i < words.size(); ++i) words[i] = {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3};
  return words;
}

TEST(Ptx, AsynchronousCopies) {
  constexpr int kWords = 32 * 7;
  const std::vector<uint4> in = numbered_words(kWords);
  std::vector<uint4> expected = in;
  DeviceArray<bool> exists(kWords);
  std::vector<std::byte> flags(kWords, std::byte{1});
  for (int i = 0; i < kWords; i += 5) flags[i] = std::byte{0}, expected[i] = {};
  exists.write(flags);
  const DeviceArray<uint4> device_in(in);
  for (const int stages : {2, 3})
    expect_repeatable("copies through " + std::to_string(stages) + " stages", [&] {
      const DeviceArray<uint4> out(kWords);
      copy_through_stages(out.get(), device_in.get(), exists.get(), kWords, stages);
      const std::vector<uint4> words = out.values();
      expect_same_bits("words", std::as_bytes(std::span(words)), std::as_bytes(std::span(expected)));
      return std::vector<float>();
    });
}

TEST(Ptx, EightGroupsOfCopies) {
  const std::vector<uint4> in = numbered_words(8);
  const DeviceArray<uint4> device_in(in), out(8);
  copy_in_groups(out.get(), device_in.get(), 8);
  const std::vector<uint4> words = out.values();
  expect_same_bits("words", std::as_bytes(std::span(words)), std::as_bytes(std::span(in)));
}

TEST(Ptx, Exponentials) {
  std::vector<float> in = uniform_values(1000, 6, -130, 128);
  in.insert(in.end(), {0, 1, -1, 127.5f, -125.99f, -INFINITY, INFINITY, 128, NAN, -126.5f, -1000});
  const DeviceArray<float> device_in(in), out(std::ssize(in));
  exponentials(out.get(), device_in.get(), static_cast<int>(in.size()));
  const std::vector<float> actual = out.values();
  for (size_t i = 0; i < in.size(); ++i) {
    const double expected = std::exp2(static_cast<double>(in[i]));
    if (std::isnan(expected))
      EXPECT_TRUE(std::isnan(actual[i])) << in[i];
    else if (expected < 0x1p-126)
      EXPECT_EQ(actual[i], 0) << in[i];
    else if (expected > std::numeric_limits<float>::max())
      EXPECT_EQ(actual[i], INFINITY) << in[i];
    else
      EXPECT_NEAR(actual[i], expected, expected * 0x1p-22) << in[i];
  }
}

TEST(Ptx, StreamingAccesses) {
  std::vector<float> in(320);
  std::iota(in.begin(), in.end(), -150.0f);
  const Tensor device_in(DType::kBf16, in);
  for (const int bytes : {2, 4, 8, 16}) {
    const Tensor out(DType::kBf16, std::ssize(in));
    stream_elements(out.data(), device_in.data(), static_cast<int>(in.size()), bytes);
    EXPECT_EQ(out.values(), rounded(in, DType::kBf16)) << bytes;
  }
}

#if defined(MINILLM_SIM)
// What a GPU answers with an error that ends the process, or with undefined data.
class PtxMisuse : public ::testing::Test {
 protected:
  ~PtxMisuse() override { sim::clear_failure(); }
  static std::string failure() {
    const cudaError_t code = cudaDeviceSynchronize();
    return code == cudaSuccess ? "" : cudaGetErrorString(code);
  }
  const DeviceArray<uint4> in_{numbered_words(20)}, out_{20};
};

TEST_F(PtxMisuse, Trap05_MisalignedCopy) {
  copy_misaligned(out_.get(), in_.as<unsigned char>(), 0);
  EXPECT_EQ(failure(), "");
  for (const int offset : {8, -8, 2}) {
    copy_misaligned(out_.get(), in_.as<unsigned char>(), offset);
    EXPECT_NE(failure().find("both must be aligned to the size"), std::string::npos) << failure();
    sim::clear_failure();
  }
}

TEST_F(PtxMisuse, NineGroupsOfCopies) {
  copy_in_groups(out_.get(), in_.get(), 9);
  EXPECT_NE(failure().find("8 groups are under way"), std::string::npos) << failure();
}
#endif

}  // namespace
}  // namespace minillm::kernels::testing
