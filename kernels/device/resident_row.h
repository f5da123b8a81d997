// Rows that a block reads from device memory once and uses twice: for a reduction, and for the result that
// needs it.
//
// A thread owns every blockDim.x-th vector of its row; slot s of thread t is vector s · blockDim.x + t. Slots
// are visited in groups of K, so that K loads are in flight. The last K slots stay in registers, the first
// ones in dynamic shared memory as far as it goes; those in between are read again, latest first, from what
// the L2 cache still holds. Where a slot is kept changes no result: groups and their order depend on the row
// and the block only.
//
//   ResidentRow<Packed<T, N>, K> row(columns / N, dynamic_shared<Packed<T, N>>(), shared_slots);
//   row.read(0, [&](int vector) { return load_packed<N>(x + vector * N); }, [&] { … row[k] … });
//   … a reduction over the block …
//   row.read_again(the same, [&] { … if (row.exists(k)) store(y + row.vector(k) * N, …) });
//
// No thread touches another's vectors: results may overwrite what was read, and nothing here synchronises.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/checked.h"
#include "kernels/device/reduce.h"

namespace minillm::kernels {

/// The bytes of V in 32-bit words where they are whole words: the compiler would give each 16-bit element of
/// a V that lives through a loop a register of its own.
template <class V>
struct alignas(V) Words {
  using Word = std::conditional_t<alignof(V) % 4 == 0, uint32_t, uint16_t>;
  Word word[sizeof(V) / sizeof(Word)];
};

template <class V>
__device__ Words<V> to_words(const V& value) {
  return __builtin_bit_cast(Words<V>, value);
}
template <class V>
__device__ V from_words(const Words<V>& words) {
  return __builtin_bit_cast(V, words);
}

/// V: what one slot holds, a Packed or a few of them.
template <class V, int K>
class ResidentRow {
 public:
  __device__ ResidentRow(int vectors, V* shared, int shared_slots)
      : shared_(shared), shared_slots_(shared_slots), vectors_(vectors) {
    slots_ = (vectors + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  }

  /// Loads each of this thread's vectors once, load(vector), and calls body() for each group. Vectors that
  /// do not exist consist of the word `missing`.
  template <class Load, class Body>
  __device__ void read(uint32_t missing, const Load& load, const Body& body) {
    const int groups = (slots_ + K - 1) / K;
    for (first_ = slots_ - groups * K; first_ < slots_; first_ += K) {  // negative slots do not exist
#pragma unroll
      for (int k = 0; k < K; ++k) {
        for (auto& word : kept_[k].word) word = static_cast<typename Words<V>::Word>(missing);
        if (exists(k)) kept_[k] = to_words(load(vector(k)));
      }
      body();
      if (first_ + K < slots_) keep();
    }
  }

  /// Visits the groups again, last first; load(vector) for what was not kept.
  template <class Load, class Body>
  __device__ void read_again(const Load& load, const Body& body) {
    for (first_ = slots_ - K; first_ > -K; first_ -= K) {
      if (first_ + K < slots_) recall(load);
      body();
    }
  }

  /// Of the group that is being visited: slot k < K, its vector in the row, and whether the row has it.
  __device__ V operator[](int k) const {
    return from_words(kept_[k]);
  }
  __device__ int vector(int k) const {
    return (first_ + k) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ bool exists(int k) const {
    return static_cast<unsigned>(vector(k)) < static_cast<unsigned>(vectors_);
  }

 private:
  __device__ void keep() {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (exists(k) && first_ + k < shared_slots_) shared_[vector(k)] = (*this)[k];
  }
  template <class Load>
  __device__ void recall(const Load& load) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!exists(k)) continue;
      if (first_ + k < shared_slots_)
        kept_[k] = to_words(shared_[vector(k)]);
      else
        kept_[k] = to_words(load(vector(k)));
    }
  }

  V* shared_;
  int shared_slots_, vectors_, slots_, first_ = 0;
  Words<V> kept_[K] = {};
};

/// How a block holds a row, for the host. `vector_bytes` is sizeof(V).
struct RowResidence {
  int threads, registers, vector_bytes;  ///< registers: K
  int64_t vectors;
  int64_t shared_limit;  ///< bytes

  int64_t slots() const { return ceil_div(vectors, threads); }
  int shared_slots() const {
    const int64_t room = shared_limit / (int64_t{threads} * vector_bytes);
    return static_cast<int>(std::clamp<int64_t>(slots() - registers, 0, room));
  }
  size_t shared_bytes() const { return size_t(shared_slots()) * threads * vector_bytes; }
  /// Bytes of a row that are read twice.
  int64_t bytes_read_again() const {
    return std::max<int64_t>(slots() - registers - shared_slots(), 0) * threads * vector_bytes;
  }
};

/// Dynamic shared memory that a block of any supported GPU can have beside 3 KiB of static.
inline constexpr int64_t kSharedOfBlock = 96 * 1024;

/// Threads that hold `vectors` in `registers` slots, a multiple of 32.
constexpr int64_t threads_to_hold(int64_t vectors, int registers) {
  return round_up(std::max<int64_t>(ceil_div(vectors, registers), 1), kWarpSize);
}

}  // namespace minillm::kernels
