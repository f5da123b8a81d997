// CUDA's device intrinsics for the simulated device. Fast approximations (__expf, …) are computed accurately
// here.
#pragma once

#include <math.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "sim/simt.h"

// --- synchronisation --------------------------------------------------------------------------------------
inline void __syncthreads() {
  sim::sync_threads();
}
inline void __syncwarp(unsigned mask = ~0u) {
  sim::sync_warp(mask);
}
inline void __threadfence() {
  sim::thread_fence();
}
inline void __threadfence_block() {
  sim::thread_fence();
}

// --- warp collectives: they exchange values and, as on CUDA, order no memory ------------------------------
namespace sim {
template <class T>
T shuffle_value(Shuffle kind, unsigned mask, T value, int operand, int width) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "4 or 8 bytes, as on CUDA");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(kind, mask, bits, operand, width);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace sim

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize) {
  return sim::shuffle_value(sim::Shuffle::kIndex, mask, value, lane, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  return sim::shuffle_value(sim::Shuffle::kUp, mask, value, static_cast<int>(delta), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  return sim::shuffle_value(sim::Shuffle::kDown, mask, value, static_cast<int>(delta), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
  return sim::shuffle_value(sim::Shuffle::kXor, mask, value, lane_mask, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return sim::ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return sim::ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return sim::ballot("__all_sync", mask, predicate != 0) == mask;
}
inline unsigned __activemask() {
  return sim::active_lanes();
}

// --- atomics on integers; on floats deliberately none: their order, and so their sum, would change from run
// to run ---
namespace sim {
template <class T>
concept AtomicInteger =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

/// An atomic orders memory only after a fence of the same thread, so that a forgotten __threadfence stays
/// visible.
template <AtomicInteger T, class Update>
T atomic_update(T* address, Update update) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  if (has_fenced()) {
    while (
        !__atomic_compare_exchange_n(address, &old, update(old), true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
  } else {
    while (
        !__atomic_compare_exchange_n(address, &old, update(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  return old;
}
}  // namespace sim

template <sim::AtomicInteger T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  // Unsigned arithmetic: the device's wraps around.
  using U = std::make_unsigned_t<T>;
  return sim::atomic_update(
      address, [value](T old) { return static_cast<T>(static_cast<U>(old) + static_cast<U>(value)); });
}
template <sim::AtomicInteger T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return sim::atomic_update(address, [value](T old) { return old < value ? value : old; });
}
template <sim::AtomicInteger T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return sim::atomic_update(address, [value](T old) { return value < old ? value : old; });
}
template <sim::AtomicInteger T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return sim::atomic_update(address, [value](T) { return value; });
}
template <sim::AtomicInteger T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return sim::atomic_update(address, [value](T old) { return old | value; });
}
template <sim::AtomicInteger T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  return sim::atomic_update(address, [=](T old) { return old == expected ? desired : old; });
}

// --- bits -------------------------------------------------------------------------------------------------
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}

// --- arithmetic -------------------------------------------------------------------------------------------
// glibc's math.h declares these reserved names with C linkage and without a definition.
extern "C" {
inline float __expf(float x) noexcept {
  return expf(x);
}
inline float __exp10f(float x) noexcept {
  return powf(10.0f, x);
}
inline float __logf(float x) noexcept {
  return logf(x);
}
inline float __log2f(float x) noexcept {
  return log2f(x);
}
inline float __log10f(float x) noexcept {
  return log10f(x);
}
inline float __sinf(float x) noexcept {
  return sinf(x);
}
inline float __cosf(float x) noexcept {
  return cosf(x);
}
inline float __powf(float x, float y) noexcept {
  return powf(x, y);
}
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return sqrtf(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fmaf_rn(float x, float y, float z) {
  return fmaf(x, y, z);
}
inline float __saturatef(float x) {
  return fminf(fmaxf(x, 0.0f), 1.0f);
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(rintf(x));
}
inline void sincospif(float x, float* sine, float* cosine) {
  const double angle = 3.14159265358979323846 * fmod(static_cast<double>(x), 2.0);
  *sine = static_cast<float>(sin(angle));
  *cosine = static_cast<float>(cos(angle));
}

namespace sim {
template <class A, class B>
concept MixedIntegers = std::is_integral_v<A> && std::is_integral_v<B>;
}
/// CUDA's overloads: the usual arithmetic conversions, and fmin/fmax (a NaN loses) for floating point.
template <class A, class B>
requires sim::MixedIntegers<A, B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
requires sim::MixedIntegers<A, B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}
inline double min(float a, double b) {
  return fmin(a, b);
}
inline double max(float a, double b) {
  return fmax(a, b);
}
inline double min(double a, float b) {
  return fmin(a, b);
}
inline double max(double a, float b) {
  return fmax(a, b);
}

// --- loads and stores with cache hints --------------------------------------------------------------------
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
inline void __nanosleep(unsigned) {}
