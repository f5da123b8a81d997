#include "kernels/embedding.h"

#include <algorithm>
#include <bit>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/stream.h"
#include "kernels/device/token_sort.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kForwardVectors = 4;

template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    embedding_forward_kernel(T* out, const T* table, const int32_t* tokens, int64_t count, int columns,
                             Divisor per_row) {
  stream_rows<kForwardVectors>(
      count, per_row,
      [&](const RowVector& at) {
        return load_packed<N>(table + int64_t{tokens[at.row]} * columns + at.vector * N);
      },
      [&](const RowVector& at, const Packed<T, N>& loaded) {
        *reinterpret_cast<Packed<T, N>*>(out + at.row * columns + at.vector * N) = loaded;
      });
}

constexpr int kThreads = 256;

/// Occurrences of a partial sum, and how many a token has at least if it is to have partial sums.
constexpr int kPiece = 64, kFrequent = 2 * kPiece;

/// starts[token] = the first occurrence of that token or a larger one; starts[vocabulary] = count.
__global__ void __launch_bounds__(kThreads)
    embedding_starts_kernel(int* starts, const Occurrence* sorted, int count, int64_t vocabulary) {
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token > vocabulary) return;
  int low = 0, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (sorted[middle].token < token)
      low = middle + 1;
    else
      high = middle;
  }
  starts[token] = low;
}

/// total += rows of dout at occurrences [first, last), in order.
template <class T, int N>
__device__ void add_occurrences(Floats<N>& total, const T* dout, const Occurrence* sorted, int first,
                                int last, int columns, int column) {
#pragma unroll 8
  for (int i = first; i < last; ++i) {
    const Floats<N> row = load<N>(dout + int64_t{sorted[i].position} * columns + column);
#pragma unroll
    for (int k = 0; k < N; ++k) total[k] += row[k];
  }
}

/// Partial sums of frequent tokens. Pieces are cut from a token's first occurrence on and only whole ones
/// have a partial sum. Whole pieces do not overlap, so at most one begins in each window of kPiece
/// occurrences, and it belongs to the token that the window ends with: block w finds the piece of window w
/// and writes partials[w].
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kStreamBlocks)
    embedding_pieces_kernel(float* partials, const T* dout, const Occurrence* sorted, const int* starts,
                            int columns) {
  const int window = static_cast<int>(blockIdx.x), first = window * kPiece;
  const int token = sorted[first + kPiece - 1].token;
  const int begin = starts[token], end = starts[token + 1];
  if (end - begin < kFrequent) return;
  const int pieces_before = max(0, (first - begin + kPiece - 1) / kPiece);
  const int piece = begin + pieces_before * kPiece;
  if (end - piece < kPiece) return;
  for (int c = static_cast<int>(threadIdx.x) * N; c < columns; c += kThreads * N) {
    Floats<N> total{};
    add_occurrences(total, dout, sorted, piece, piece + kPiece, columns, c);
    store(partials + int64_t{window} * columns + c, total);
  }
}

/// Block rows of threads, one per token: the token's row of the table.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kStreamBlocks)
    embedding_rows_kernel(float* dtable, const float* partials, const T* dout, const Occurrence* sorted,
                          const int* starts, int64_t vocabulary, int columns, bool accumulate) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= vocabulary) return;
  const int begin = starts[token], end = starts[token + 1];
  if (accumulate && begin == end) return;
  const int pieces = end - begin < kFrequent ? 0 : (end - begin) / kPiece;
  for (int c = static_cast<int>(threadIdx.x) * N; c < columns; c += static_cast<int>(blockDim.x) * N) {
    Floats<N> total{};
    const float* partial = partials + int64_t{begin / kPiece} * columns + c;
#pragma unroll 8
    for (int i = 0; i < pieces; ++i) {
      const Floats<N> sum = load<N>(partial + int64_t{i} * columns);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += sum[k];
    }
    add_occurrences(total, dout, sorted, begin + pieces * kPiece, end, columns, c);
    float* const to = dtable + token * columns + c;
    if (accumulate) {
      const Floats<N> before = load<N>(to);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += before[k];
    }
    store(to, total);
  }
}

/// The parts of the scratch memory, in the order of their alignment.
struct Scratch {
  float* partials;     ///< [count / kPiece, columns]
  Occurrence* sorted;  ///< [count]
  SortScratch sort;
  int* starts;  ///< [vocabulary + 1]
  int64_t bytes;

  Scratch(void* memory, const TokenSort& shape, int64_t vocabulary, int columns) : bytes(0) {
    const auto take = [&]<class Element>(Element*& array, int64_t elements) {
      array = reinterpret_cast<Element*>(static_cast<char*>(memory) + bytes);
      bytes += round_up(elements * static_cast<int64_t>(sizeof(Element)), 16);
    };
    take(partials, int64_t{shape.count / kPiece} * columns);
    take(sorted, shape.count);
    take(sort.spare, shape.count);
    take(sort.counts, shape.counts());
    take(starts, vocabulary + 1);
  }
};

template <class T, int N>
void launch_sums(const EmbeddingBackward& a, const Scratch& scratch, cudaStream_t stream) {
  launch("embedding_pieces", embedding_pieces_kernel<T, N>,
         {.grid = static_cast<unsigned>(a.count / kPiece), .block = kThreads, .stream = stream},
         scratch.partials, static_cast<const T*>(a.dout), scratch.sorted, scratch.starts, a.columns);
  const unsigned across =
      std::bit_ceil(static_cast<unsigned>(std::clamp<int64_t>(a.columns / N, 1, kThreads)));
  const unsigned rows = kThreads / across;
  launch("embedding_rows", embedding_rows_kernel<T, N>,
         {.grid = blocks_for(a.vocabulary, rows), .block = dim3(across, rows), .stream = stream}, a.dtable,
         scratch.partials, static_cast<const T*>(a.dout), scratch.sorted, scratch.starts, a.vocabulary,
         a.columns, a.accumulate);
}

}  // namespace

void embedding_forward(const EmbeddingForward& a, cudaStream_t stream) {
  if (a.count == 0 || a.columns == 0) return;
  const int access = access_bytes({a.out, a.table}, a.columns * size_of(a.dtype));
  dispatch(a.dtype, access, [&]<class T, int N>() {
    const Divisor per_row(static_cast<uint32_t>(a.columns / N));
    launch("embedding_forward", embedding_forward_kernel<T, N>,
           {.grid = blocks_for(a.count * per_row.value(), kStreamThreads * kForwardVectors),
            .block = kStreamThreads,
            .stream = stream},
           static_cast<T*>(a.out), static_cast<const T*>(a.table), a.tokens, a.count, a.columns, per_row);
  });
}

Cost embedding_forward_cost(int64_t count, int columns, DType dtype) {
  return {.bytes = count * (2 * columns * size_of(dtype) + 4), .flops = 0};
}

void embedding_backward(const EmbeddingBackward& a, cudaStream_t stream) {
  if (a.vocabulary == 0 || a.columns == 0) return;
  const TokenSort shape(a.count, a.vocabulary);
  const Scratch scratch(a.scratch, shape, a.vocabulary, a.columns);
  if (a.count > 0) sort_tokens(scratch.sorted, a.tokens, shape, scratch.sort, stream);
  launch("embedding_starts", embedding_starts_kernel,
         {.grid = blocks_for(a.vocabulary + 1, kThreads), .block = kThreads, .stream = stream},
         scratch.starts, scratch.sorted, shape.count, a.vocabulary);
  const int elements =
      aligned_elements({{a.dout, size_of(a.dtype)}, {a.dtable, 4}, {a.scratch, 4}}, a.columns);
  dispatch(a.dtype, [&]<class T>() {
    if (elements >= 4)
      launch_sums<T, 4>(a, scratch, stream);
    else if (elements >= 2)
      launch_sums<T, 2>(a, scratch, stream);
    else
      launch_sums<T, 1>(a, scratch, stream);
  });
}

int64_t embedding_backward_scratch(int64_t count, int64_t vocabulary, int columns) {
  return Scratch(nullptr, TokenSort(count, vocabulary), vocabulary, columns).bytes;
}

Cost embedding_backward_cost(int64_t count, int64_t vocabulary, int columns, DType dtype, bool accumulate) {
  const TokenSort shape(count, vocabulary);
  const auto occurrence = static_cast<int64_t>(sizeof(Occurrence));
  // A pass reads the occurrences (the first one the tokens) twice and writes them once.
  const int64_t sorting = count * (4 + occurrence) + (shape.passes - 1) * count * 3 * occurrence;
  const int64_t sums = count * occurrence + 2 * (vocabulary + 1) * 4;
  // Partial sums written and read, at most: all tokens frequent.
  const int64_t partials = 2 * (count / kPiece) * columns * 4;
  const int64_t added = accumulate ? std::min(count, vocabulary) : 0;  // rows that are read, too
  const int64_t table_rows = accumulate ? 2 * added : vocabulary;
  return {.bytes = count * (columns * size_of(dtype) + 4) + table_rows * columns * 4,
          .flops = (count + added) * columns,
          .extra_bytes = sorting + sums + partials};
}

}  // namespace minillm::kernels
