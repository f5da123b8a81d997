#include "kernels/adamw.h"

#include <cfloat>
#include <cmath>

#include "kernels/device/launch.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;

__device__ bool is_finite(float value) {
  return fabsf(value) <= FLT_MAX;  // false for NaN
}

/// The update's numbers, computed in double on the host: 1 - β in fp32 would lose half of its digits.
struct Coefficients {
  float decay;               // lr · weight_decay
  float step_size;           // lr / (1 - β1^t)
  float root_of_correction;  // sqrt(1 - β2^t)
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float epsilon;
};

Coefficients coefficients_of(const AdamW& a) {
  const double t = static_cast<double>(a.step);
  return {
      .decay = static_cast<float>(a.learning_rate * a.weight_decay),
      .step_size = static_cast<float>(a.learning_rate / (1 - std::pow(a.beta1, t))),
      .root_of_correction = static_cast<float>(std::sqrt(1 - std::pow(a.beta2, t))),
      .beta2 = static_cast<float>(a.beta2),
      .one_minus_beta1 = static_cast<float>(1 - a.beta1),
      .one_minus_beta2 = static_cast<float>(1 - a.beta2),
      .epsilon = static_cast<float>(a.epsilon),
  };
}

struct Arrays {
  float* master;
  float* moment1;
  float* moment2;
  __nv_bfloat16* parameter;
  const float* gradient;
};

template <int N>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Arrays a, const float* gradient_scale, int64_t count, Coefficients c) {
  const float scale = *gradient_scale;
  if (!is_finite(scale)) return;
  for_vector_of_thread<N>(count, [&]<int M>(int64_t i) {
    const Floats<M> gradient = load<M>(a.gradient + i);
    Floats<M> p = load<M>(a.master + i), m = load<M>(a.moment1 + i), v = load<M>(a.moment2 + i);
#pragma unroll
    for (int k = 0; k < M; ++k) {
      const float g = gradient[k] * scale;
      p[k] -= c.decay * p[k];
      m[k] += c.one_minus_beta1 * (g - m[k]);
      v[k] = c.beta2 * v[k] + c.one_minus_beta2 * g * g;
      p[k] -= c.step_size * m[k] / (sqrtf(v[k]) / c.root_of_correction + c.epsilon);
    }
    store(a.master + i, p);
    store(a.moment1 + i, m);
    store(a.moment2 + i, v);
    if (a.parameter != nullptr) store(a.parameter + i, p);
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

void adamw(const AdamW& a, cudaStream_t stream) {
  const Arrays arrays = {a.master, a.moment1, a.moment2, static_cast<__nv_bfloat16*>(a.parameter),
                         a.gradient};
  const bool vectorize = can_vectorize({a.master, a.moment1, a.moment2, a.parameter, a.gradient});
  const int width = vectorize ? kFullWidth<float> : 1;
  launch("adamw", vectorize ? adamw_kernel<kFullWidth<float>> : adamw_kernel<1>,
         {.grid = vector_blocks(a.count, width, kThreads), .block = kThreads, .stream = stream}, arrays,
         a.gradient_scale, a.count, coefficients_of(a));
}

void clip_factor(const ClipFactor& a, cudaStream_t stream) {
  launch("clip_factor", clip_factor_kernel, {.grid = 1, .block = 1, .stream = stream}, a.factor, a.norm,
         a.sum_of_squares, a.limit);
}

// Reads master, both moments and the gradient; writes the first three and the copy.
Cost adamw_cost(int64_t count, bool parameter_copy) {
  return {.bytes = (parameter_copy ? 30 : 28) * count, .flops = 17 * count};
}

}  // namespace minillm::kernels
