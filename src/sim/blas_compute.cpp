#include "sim/blas_compute.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "sim/sanitizer.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void*, unsigned long);
extern "C" void __tsan_write_range(void*, unsigned long);
// The loops over operands are announced as ranges instead: instrumented element by element they would take
// longer than the product.
#define SIM_BLAS_ANNOUNCED __attribute__((no_sanitize("thread")))
#else
#define SIM_BLAS_ANNOUNCED
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sim {
namespace {

enum class Access { kRead, kWrite };

void announce_range(const char* name, void* data, int64_t bytes, Access access) {
#if defined(__SANITIZE_THREAD__)
  access == Access::kRead ? __tsan_read_range(data, bytes) : __tsan_write_range(data, bytes);
#elif defined(__SANITIZE_ADDRESS__)
  if (const void* bad = __asan_region_is_poisoned(data, bytes)) {
    const int64_t offset = static_cast<const char*>(bad) - static_cast<char*>(data);
    throw std::runtime_error(
        std::string("cublasLtMatmul ") + (access == Access::kRead ? "reads " : "writes ") + name +
        " outside its memory, at byte " + std::to_string(offset) + " of " + std::to_string(bytes));
  }
#endif
  (void)name, (void)data, (void)bytes, (void)access;
}

/// Tells the sanitizers what is about to be accessed: the gaps between columns are not.
void announce(const BlasMatrix& matrix, Access access) {
  const int64_t column = matrix.rows * blas_element_size(matrix.type);
  const int64_t stride = matrix.ld * blas_element_size(matrix.type);
  if (column == stride) return announce_range(matrix.name, matrix.data, column * matrix.cols, access);
  for (int64_t j = 0; j < matrix.cols; ++j)
    announce_range(matrix.name, static_cast<char*>(matrix.data) + j * stride, column, access);
}

/// Memory of one stream's thread for converted operands, kept between calls.
class Scratch {
 public:
  float* at_least(int64_t count) {
    if (count > capacity_) {
      capacity_ = (count + 15) / 16 * 16;
      data_.reset(static_cast<float*>(std::aligned_alloc(64, capacity_ * sizeof(float))));
      if (!data_) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

SIM_BLAS_ANNOUNCED inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}

/// Round to nearest even; a NaN stays a (quiet) NaN.
SIM_BLAS_ANNOUNCED inline uint16_t to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(nan ? 0x7fffu : rounded);
}

SIM_BLAS_ANNOUNCED void widen(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_bf16(from[i]);
}

SIM_BLAS_ANNOUNCED void round_to_bf16(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = from_bf16(to_bf16(values[i]));
}

/// A dense fp32 copy. Also of fp32 operands: the product then depends on shape and values alone, never on the
/// alignment or the leading dimension of the caller's memory.
SIM_BLAS_ANNOUNCED void pack(const BlasMatrix& matrix, float* to) {
  for (int64_t j = 0; j < matrix.cols; ++j, to += matrix.rows) {
    if (matrix.type == CUDA_R_16BF)
      widen(static_cast<const uint16_t*>(matrix.data) + j * matrix.ld, to, matrix.rows);
    else
      __builtin_memcpy(to, static_cast<const float*>(matrix.data) + j * matrix.ld,
                       matrix.rows * sizeof(float));
  }
}

SIM_BLAS_ANNOUNCED inline float load(const float* p) {
  return *p;
}
SIM_BLAS_ANNOUNCED inline float load(const uint16_t* p) {
  return from_bf16(*p);
}
SIM_BLAS_ANNOUNCED inline void store(float* p, float value) {
  *p = value;
}
SIM_BLAS_ANNOUNCED inline void store(uint16_t* p, float value) {
  *p = to_bf16(value);
}

template <class T>
SIM_BLAS_ANNOUNCED void finish(const BlasProblem& p, const float* product) {
  const T* bias = static_cast<const T*>(p.bias);
  for (int64_t j = 0; j < p.d.cols; ++j) {
    const float* from = product + j * p.d.rows;
    const T* c = static_cast<const T*>(p.c.data) + j * p.c.ld;
    T* d = static_cast<T*>(p.d.data) + j * p.d.ld;
    for (int64_t i = 0; i < p.d.rows; ++i) {
      float value = p.alpha * from[i];
      if (p.beta != 0) value += p.beta * load(c + i);
      if (bias) value += load(bias + i);
      store(d + i, value);
    }
  }
}

/// d = op(a) · op(b) of packed operands.
void multiply(const BlasProblem& p, const float* a, const float* b, float* d) {
  const int64_t k = p.transpose_a ? p.a.rows : p.a.cols;
  for (int part = 0; part < p.parts; ++part) {
    const int64_t begin = k * part / p.parts, end = k * (part + 1) / p.parts;
    if (begin == end && part + 1 < p.parts) continue;  // k is smaller than parts; the last is never empty
    const float* a_part = a + begin * (p.transpose_a ? 1 : p.a.rows);
    const float* b_part = b + begin * (p.transpose_b ? p.b.rows : 1);
    // oneDNN is row-major: D transposed = op(B) transposed · op(A) transposed.
    const dnnl_status_t status =
        dnnl_sgemm(p.transpose_b ? 'T' : 'N', p.transpose_a ? 'T' : 'N', p.d.cols, p.d.rows, end - begin,
                   1.0f, b_part, p.b.rows, a_part, p.a.rows, begin == 0 ? 0.0f : 1.0f, d, p.d.rows);
    if (status != dnnl_success) throw std::runtime_error("oneDNN sgemm: status " + std::to_string(status));
    if (p.sum_in_output_type && p.d.type == CUDA_R_16BF) round_to_bf16(d, p.d.rows * p.d.cols);
  }
}

}  // namespace

void compute_matmul(const BlasProblem& p) {
  announce(p.a, Access::kRead);
  announce(p.b, Access::kRead);
  if (p.beta != 0) announce(p.c, Access::kRead);
  if (p.bias)
    announce_range("bias", const_cast<void*>(p.bias), p.d.rows * blas_element_size(p.d.type), Access::kRead);
  announce(p.d, Access::kWrite);

  // Scratch memory passes from stream to stream on one thread: that orders nothing and is no race.
  const InvisibleScope invisible;
  thread_local Scratch scratch_a, scratch_b, scratch_d;
  float* a = scratch_a.at_least(p.a.rows * p.a.cols);
  float* b = scratch_b.at_least(p.b.rows * p.b.cols);
  float* d = scratch_d.at_least(p.d.rows * p.d.cols);
  pack(p.a, a);
  pack(p.b, b);

  // One thread per product: oneDNN splits sums by the number of threads, and the streams are the parallelism.
  omp_set_num_threads(1);
  multiply(p, a, b, d);

  p.d.type == CUDA_R_16BF ? finish<uint16_t>(p, d) : finish<float>(p, d);
}

}  // namespace sim
