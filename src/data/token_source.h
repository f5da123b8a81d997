// Where tokens come from. A source is a pure function of a sample's number: which sample a rank trains on is
// arithmetic on (step, world size, rank), so nothing has to be saved to resume and any world size sees the
// same samples in the same global order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "config/config.h"

namespace minillm::data {

class TokenSource {
 public:
  virtual ~TokenSource() = default;

  /// Fills one sequence: tokens[T] and targets[T]. `sample` is the position in the global order of samples,
  /// >= 0. Safe to call from several threads.
  virtual void read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const = 0;

  /// One line for the log: what it is and how much there is.
  virtual std::string describe() const = 0;
};

/// Fills a rank's batch of a step: sequences [batch, T]. Sample b of rank r in step s has the global number
/// s · world · batch + r · batch + b.
void read_batch(const TokenSource& source, int64_t step, int world, int rank, int64_t batch,
                std::span<int32_t> tokens, std::span<int32_t> targets);

/// "random": uniform tokens and targets below vocab_size, of Philox(seed, sample).
/// "text": the bytes of the files that data.path names (sorted by path, joined), cut into windows of seq_len
/// + 1
///   bytes that start every seq_len bytes; targets are the next bytes. Each epoch visits every window once in
///   an order that is a keyed permutation of (seed, epoch). The files are held in memory.
/// Throws UsageError for an unknown source or missing path; InputError when no file matches, a file cannot be
/// read, is empty, is shorter than a window (both lengths named), or holds a byte >= vocab_size (file,
/// position, value).
std::unique_ptr<TokenSource> make_token_source(const config::Config& config);

}  // namespace minillm::data
