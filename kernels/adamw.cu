#include "kernels/adamw.h"

#include <cfloat>
#include <cmath>
#include <string>

#include "core/error.h"
#include "core/split_float.h"
#include "kernels/device/launch.h"
#include "kernels/device/ptx.h"
#include "kernels/device/rng.h"
#include "kernels/device/stream.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

__device__ bool is_finite(float value) {
  return fabsf(value) <= FLT_MAX;  // false for NaN
}

/// The options as the kernel uses them, computed in double on the host: 1 - β in fp32 would lose half of its
/// digits.
struct Coefficients {
  double weight_decay;  // multiplied in double and rounded once, as the host does with the step's numbers
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float epsilon;
};

Coefficients coefficients_of(const AdamWOptions& o) {
  return {
      .weight_decay = o.weight_decay,
      .beta2 = static_cast<float>(o.beta2),
      .one_minus_beta1 = static_cast<float>(1 - o.beta1),
      .one_minus_beta2 = static_cast<float>(1 - o.beta2),
      .epsilon = static_cast<float>(o.epsilon),
  };
}

/// Master parameters as they lie in memory, or a vector of them in registers: fp32, or in two halves.
template <class Parameter>
struct Masters;
template <>
struct Masters<float> {
  float* all;

  template <int M>
  __device__ Packed<float, M> load(int64_t i) const {
    return load_streaming<M>(all + i);
  }
  template <int M>
  __device__ void store(int64_t i, const Floats<M>& p) const {
    store_streaming(all + i, pack<float>(p));
  }
};
template <int M>
struct PackedHalves {
  Packed<uint16_t, M> upper, lower;

  __device__ Floats<M> floats() const {
    Floats<M> result;
#pragma unroll
    for (int k = 0; k < M; ++k) result[k] = __uint_as_float(join_float({upper.element[k], lower.element[k]}));
    return result;
  }
};
template <>
struct Masters<__nv_bfloat16> {
  uint16_t* upper;
  uint16_t* lower;

  template <int M>
  __device__ PackedHalves<M> load(int64_t i) const {
    return {load_streaming<M>(upper + i), load_streaming<M>(lower + i)};
  }
  // The upper halves are what the next gather reads: they may stay in the cache.
  template <int M>
  __device__ void store(int64_t i, const Floats<M>& p) const {
    PackedHalves<M> packed;
#pragma unroll
    for (int k = 0; k < M; ++k) {
      const SplitFloat halves = split_float(__float_as_uint(p[k]));
      packed.upper.element[k] = halves.upper;
      packed.lower.element[k] = halves.lower;
    }
    store_packed(upper + i, packed.upper);
    store_streaming(lower + i, packed.lower);
  }
};

template <class Moment>
struct Arrays {
  Moment* moment1;
  Moment* moment2;
  const float* gradient;
};

/// Which random bits round bf16 moments, beside the step.
struct Rounding {
  uint64_t seed;
  int64_t first_element;
};

template <class PackedMaster, class Moment, int M>
struct Operands {
  PackedMaster master;
  Packed<float, M> gradient;
  Packed<Moment, M> moment1, moment2;
};

/// Rounds the moments of elements i to i + M - 1: low halves of the random words are the first moment's, high
/// halves the second's.
template <int M>
__device__ void store_moments(__nv_bfloat16* moment1, __nv_bfloat16* moment2, int64_t i, const Floats<M>& m,
                              const Floats<M>& v, const Rounding& r, int64_t step) {
  static_assert(M == 1 || M == kElementsPerDraw);
  const int64_t element = r.first_element + i;
  const PhiloxWords words = rounding_words(r.seed, step, element / kElementsPerDraw);
  Packed<__nv_bfloat16, M> packed_m, packed_v;
#pragma unroll
  for (int k = 0; k < M; ++k) {
    uint32_t word = words.word[k];
    if constexpr (M == 1) {  // selected without an index: registers have none
#pragma unroll
      for (int other = 1; other < kElementsPerDraw; ++other)
        if (element % kElementsPerDraw == other) word = words.word[other];
    }
    packed_m.element[k] = __ushort_as_bfloat16(stochastic_bf16(__float_as_uint(m[k]), word & 0xffff));
    packed_v.element[k] = __ushort_as_bfloat16(stochastic_bf16(__float_as_uint(v[k]), word >> 16));
  }
  store_streaming(moment1 + i, packed_m);
  store_streaming(moment2 + i, packed_v);
}
template <int M>
__device__ void store_moments(float* moment1, float* moment2, int64_t i, const Floats<M>& m,
                              const Floats<M>& v, const Rounding&, int64_t) {
  store_streaming(moment1 + i, pack<float>(m));
  store_streaming(moment2 + i, pack<float>(v));
}

/// One vector per thread: its loads are enough in flight. Fused operations are written out, so that the
/// compiler cannot choose them differently for vectors and for single elements: how a shard is cut into
/// launches must not show in the results.
template <class Parameter, class Moment, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    adamw_kernel(Masters<Parameter> masters, Arrays<Moment> a, const float* gradient_scale,
                 const AdamWStep* step, int64_t count, Coefficients c, Rounding r) {
  const float scale = *gradient_scale;
  if (!is_finite(scale)) return;
  stream_vectors<N, 1>(
      count,
      [&]<int M>(int64_t i) {
        return Operands<decltype(masters.template load<M>(i)), Moment, M>{
            masters.template load<M>(i), load_streaming<M>(a.gradient + i), load_streaming<M>(a.moment1 + i),
            load_streaming<M>(a.moment2 + i)};
      },
      [&]<int M>(int64_t i, const auto& in) {
        const AdamWStep now = *step;  // here, so that no load of a vector waits for it
        const float decay = static_cast<float>(now.learning_rate * c.weight_decay);
        const Floats<M> gradient = in.gradient.floats();
        Floats<M> p = in.master.floats(), m = in.moment1.floats(), v = in.moment2.floats();
#pragma unroll
        for (int k = 0; k < M; ++k) {
          const float g = __fmul_rn(gradient[k], scale);
          const float second = fmaf(c.one_minus_beta2 * g, g, c.beta2 * v[k]);
          if (!is_finite(second)) continue;  // nor is g, or its square is too large
          p[k] = fmaf(-decay, p[k], p[k]);
          m[k] = fmaf(c.one_minus_beta1, g - m[k], m[k]);
          v[k] = second;
          p[k] -= now.step_size * m[k] / fmaf(sqrtf(v[k]), now.correction, c.epsilon);
        }
        masters.store(i, p);
        store_moments(a.moment1, a.moment2, i, m, v, r, now.step);
      });
}

__global__ void clip_factor_kernel(float* factor, float* norm, const float* sum_of_squares, float limit) {
  const float root = sqrtf(*sum_of_squares);
  *norm = root;
  if (!is_finite(root))
    *factor = NAN;
  else
    *factor = limit > 0 ? fminf(1.0f, limit / (root + 1e-6f)) : 1.0f;
}

}  // namespace

AdamWStep adamw_step(const AdamWOptions& options, double learning_rate, int64_t step) {
  if (step < 1) throw InternalError("AdamW: step " + std::to_string(step) + ": the first update is step 1");
  const double t = static_cast<double>(step);
  return {.learning_rate = learning_rate,
          .step = step,
          .step_size = static_cast<float>(learning_rate / (1 - std::pow(options.beta1, t))),
          .correction = static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, t)))};
}

void adamw(const AdamW& a, cudaStream_t stream) {
  const int64_t moment_bytes = size_of(a.moment_type);
  const bool whole_draws = a.moment_type == DType::kFp32 || a.first_element % kElementsPerDraw == 0;
  const bool halves = a.lower_half != nullptr;
  const bool vectorize = whole_draws && aligned_elements({{a.parameter, halves ? 2 : 4},
                                                          {a.lower_half, 2},
                                                          {a.moment1, moment_bytes},
                                                          {a.moment2, moment_bytes},
                                                          {a.gradient, 4}}) >= kFullWidth<float>;
  const auto run = [&]<class Parameter>(const Masters<Parameter>& masters) {
    dispatch(a.moment_type, [&]<class Moment>() {
      const Arrays<Moment> arrays = {static_cast<Moment*>(a.moment1), static_cast<Moment*>(a.moment2),
                                     a.gradient};
      const auto launch_width = [&]<int N>() {
        launch("adamw", adamw_kernel<Parameter, Moment, N>,
               {.grid = stream_blocks<N, 1>(a.count), .block = kStreamThreads, .stream = stream}, masters,
               arrays, a.gradient_scale, a.step, a.count, coefficients_of(a.options),
               Rounding{a.seed, a.first_element});
      };
      if (vectorize)
        launch_width.template operator()<kFullWidth<float>>();
      else
        launch_width.template operator()<1>();
    });
  };
  if (halves)
    run(Masters<__nv_bfloat16>{static_cast<uint16_t*>(a.parameter), a.lower_half});
  else
    run(Masters<float>{static_cast<float*>(a.parameter)});
}

void clip_factor(const ClipFactor& a, cudaStream_t stream) {
  launch("clip_factor", clip_factor_kernel, {.grid = 1, .block = 1, .stream = stream}, a.factor, a.norm,
         a.sum_of_squares, a.limit);
}

// Reads masters, both moments and the gradient; writes the first three.
Cost adamw_cost(int64_t count, DType moment_type) {
  const int64_t per_element = 3 * 4 + 4 * size_of(moment_type);
  return {.bytes = per_element * count, .flops = 17 * count};
}

}  // namespace minillm::kernels
