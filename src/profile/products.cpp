#include <array>
#include <utility>

#include "profile/shapes.h"

namespace minillm::profile {

Case product_case(std::string name, int64_t calls, const cuda::GemmKey& key, bool in_place) {
  static const std::byte some{};  // stands for operands that only have to be there
  cuda::Gemm gemm{.m = key.m,
                  .n = key.n,
                  .k = key.k,
                  .transpose_a = key.transpose_a,
                  .transpose_b = key.transpose_b,
                  .c = &some,
                  .beta = key.accumulate ? 1.0f : 0.0f,
                  .bias = key.bias ? &some : nullptr,
                  .input = key.input,
                  .output = key.output};
  const bool separate = key.accumulate && !in_place;
  return {.name = std::move(name),
          .calls = calls,
          .cost = cuda::gemm_cost(gemm),
          .buffers = {tensor(key.m * key.k, key.input), tensor(key.k * key.n, key.input),
                      tensor(key.m * key.n, key.output), tensor(separate ? key.m * key.n : 0, key.output),
                      tensor(key.bias ? key.n : 0, key.output)},
          .run =
              [=](const Operands& o) {
                const auto [a, b, d, c, bias] = o.take<5>();
                cuda::Gemm g = gemm;
                g.a = a, g.b = b, g.d = d, g.c = separate ? c : d;
                if (key.bias) g.bias = bias;
                o.blas.run(g, o.stream);
              },
          .product = key};
}

void add_products(std::vector<Case>& cases, const Shapes& s) {
  // out[rows, columns] = in[rows, in_columns] · weight[columns, in_columns]ᵀ and what its gradients take.
  const auto linear = [&](int64_t rows, int64_t columns, int64_t in_columns, bool bias, bool residual) {
    return cuda::GemmKey{.m = rows,
                         .n = columns,
                         .k = in_columns,
                         .transpose_b = true,
                         .accumulate = residual,
                         .bias = bias,
                         .input = s.dtype,
                         .output = s.dtype};
  };
  const auto input_gradient = [&](int64_t rows, int64_t columns, int64_t in_columns) {
    return cuda::GemmKey{.m = rows, .n = in_columns, .k = columns, .input = s.dtype, .output = s.dtype};
  };
  const auto weight_gradient = [&](int64_t rows, int64_t columns, int64_t in_columns, bool accumulate) {
    return cuda::GemmKey{.m = columns,
                         .n = in_columns,
                         .k = rows,
                         .transpose_a = true,
                         .accumulate = accumulate,
                         .input = s.dtype,
                         .output = DType::kFp32};
  };

  struct Linear {
    std::string name;
    int64_t columns, in_columns;
    bool bias, residual;
  };
  const std::array linears = {
      Linear{"gemm qkv", 3 * s.dim, s.dim, true, false}, Linear{"gemm out", s.dim, s.dim, true, true},
      Linear{"gemm up", s.ffn, s.dim, false, false}, Linear{"gemm down", s.dim, s.ffn, false, true}};
  const int64_t fresh = s.micro_batches - s.added;  // micro-batches whose gradients are written, not added
  const auto add = [&](std::string name, int64_t calls, const cuda::GemmKey& key, bool in_place = false) {
    if (calls > 0) cases.push_back(product_case(std::move(name), calls, key, in_place));
  };
  for (const auto& [name, columns, in_columns, bias, residual] : linears) {
    const int64_t again = name == "gemm down" ? 0 : s.recomputed_blocks;  // the last product is not repeated
    add(name, s.block_passes + again, linear(s.rows, columns, in_columns, bias, residual));
    add(name + " dX", s.block_passes, input_gradient(s.rows, columns, in_columns));
    add(name + " dW", s.layers * fresh, weight_gradient(s.rows, columns, in_columns, false));
    add(name + " dW, added", s.layers * s.added, weight_gradient(s.rows, columns, in_columns, true), true);
  }

  const int64_t columns = s.padded_vocabulary;
  bool first = true;  // the first chunk's gradient is written, the others' are added to it
  for (const auto& [suffix, rows, count] : s.chunks) {
    const std::string name = "gemm logits";
    const int64_t calls = count * s.micro_batches, written = first ? fresh : 0;
    add(name + suffix, calls, linear(rows, columns, s.dim, false, false));
    add(name + " dX" + suffix, calls, input_gradient(rows, columns, s.dim));
    add(name + " dW, first chunk", written, weight_gradient(rows, columns, s.dim, false));
    add(name + " dW" + suffix, calls - written, weight_gradient(rows, columns, s.dim, true), true);
    first = false;
  }
}

}  // namespace minillm::profile
