#include "data/token_source.h"

#include <algorithm>

#include "core/checked.h"
#include "core/error.h"
#include "core/philox.h"
#include "data/corpus.h"
#include "data/permutation.h"

namespace minillm::data {
namespace {

/// Random streams of this folder. The seed is also the initial weights', whose streams are small tensor
/// numbers.
enum class Purpose : uint64_t { kRandomTokens = 0x746f6b656e730000, kShuffle = 0x73687566666c6500 };

/// A key for one purpose that shares no random words with any other use of the seed.
uint64_t derived_key(uint64_t seed, Purpose purpose, uint64_t number) {
  const PhiloxWords words = philox(seed, static_cast<uint64_t>(purpose), number);
  return uint64_t{words.word[1]} << 32 | words.word[0];
}

class RandomTokens final : public TokenSource {
 public:
  RandomTokens(int64_t vocab_size, int64_t seed)
      : vocab_size_(vocab_size), key_(derived_key(seed, Purpose::kRandomTokens, 0)) {}

  void read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const override {
    for (size_t t = 0; t < tokens.size(); ++t) {
      const PhiloxWords words = philox(key_, sample, t);
      tokens[t] = below_vocabulary(words.word[0]);
      targets[t] = below_vocabulary(words.word[1]);
    }
  }

  std::string describe() const override {
    return "random tokens and targets below " + std::to_string(vocab_size_);
  }

 private:
  int32_t below_vocabulary(uint32_t word) const {
    return static_cast<int32_t>(word * static_cast<uint64_t>(vocab_size_) >> 32);
  }

  int64_t vocab_size_;
  uint64_t key_;
};

class TextTokens final : public TokenSource {
 public:
  TextTokens(const config::Config& config)
      : seed_(config.train.seed),
        seq_len_(config.train.seq_len),
        corpus_(read_corpus(config.data.path, config.model.vocab_size)),
        windows_((static_cast<int64_t>(corpus_.bytes.size()) - 1) / seq_len_) {
    if (windows_ == 0) {
      throw InputError("data.path: '" + config.data.path + "' holds " + std::to_string(corpus_.bytes.size()) +
                       " bytes; one window of train.seq_len + 1 needs " + std::to_string(seq_len_ + 1) +
                       ". Add text or reduce train.seq_len");
    }
  }

  void read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const override {
    if (static_cast<int64_t>(tokens.size()) != seq_len_)
      throw InternalError("text source: a sequence of " + std::to_string(tokens.size()) +
                          " tokens was asked for");
    const int64_t epoch = sample / windows_;
    const int64_t window = permute(sample % windows_, windows_, derived_key(seed_, Purpose::kShuffle, epoch));
    const uint8_t* first = corpus_.bytes.data() + window * seq_len_;
    std::copy_n(first, seq_len_, tokens.begin());
    std::copy_n(first + 1, seq_len_, targets.begin());
  }

  std::string describe() const override {
    return "text: " + std::to_string(corpus_.files) + " files, " + std::to_string(corpus_.bytes.size()) +
           " bytes, " + std::to_string(windows_) + " windows of " + std::to_string(seq_len_) + " per epoch";
  }

 private:
  uint64_t seed_;
  int64_t seq_len_;
  Corpus corpus_;
  int64_t windows_;
};

}  // namespace

void read_batch(const TokenSource& source, int64_t step, int world, int rank, int64_t batch,
                std::span<int32_t> tokens, std::span<int32_t> targets) {
  if (tokens.size() != targets.size()) throw InternalError("read_batch: tokens and targets differ in size");
  const int64_t length = div_exact(static_cast<int64_t>(tokens.size()), batch);
  const int64_t first = (step * world + rank) * batch;
  for (int64_t b = 0; b < batch; ++b)
    source.read(first + b, tokens.subspan(b * length, length), targets.subspan(b * length, length));
}

std::unique_ptr<TokenSource> make_token_source(const config::Config& config) {
  const std::string& source = config.data.source;
  if (source == "random") return std::make_unique<RandomTokens>(config.model.vocab_size, config.train.seed);
  if (source != "text") throw UsageError("data.source: '" + source + "' is unknown; allowed: random, text");
  if (config.data.path.empty())
    throw UsageError("data.path: empty; the source \"text\" needs a file or a glob");
  return std::make_unique<TextTokens>(config);
}

}  // namespace minillm::data
