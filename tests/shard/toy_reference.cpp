#include "toy.h"

namespace minillm::shard {
namespace {

// Whole parameters, and ranks and micro-batches one after another.
class Reference {
 public:
  Reference(const Layout& layout, const Policy& policy)
      : layout_(layout),
        policy_(policy),
        units_(static_cast<int>(layout.units.size())),
        ranks_(layout.world * policy.replicas) {
    restart();
  }

  void restart() {
    for (auto* all : {&masters_, &moments1_, &moments2_}) all->clear();
    for (int u = 0; u < units_; ++u) {
      const UnitLayout& unit = layout_.units[u];
      const std::vector<float> zeros(static_cast<size_t>(unit.padded_elements));
      for (auto* all : {&masters_, &moments1_, &moments2_}) all->push_back(zeros);
      for (const Slice& slice : unit.slices)
        for (int64_t j = slice.offset; j < slice.offset + slice.elements; ++j)
          masters_[u][j] = toy_initial(u, j);
    }
  }

  ToyRecord step(int step) {
    gradients_.clear();
    for (const std::vector<float>& master : masters_) gradients_.emplace_back(master.size());
    std::vector<Lanes> inputs;
    float valid = 0, loss = 0, sum = 0;
    for (int rank = 0; rank < ranks_; ++rank)
      for (int m = 0; m < policy_.micro_batches; ++m) {
        Lanes& tokens = inputs.emplace_back(kToyWidth);
        for (int i = 0; i < kToyWidth; ++i) valid += toy_valid(tokens[i] = toy_token(step, rank, m, i));
      }
    for (const Lanes& tokens : inputs) loss += run_passes(tokens, valid);
    for (const std::vector<float>& unit : gradients_)
      for (float gradient : unit) sum += gradient;
    const float gate = policy_.clip ? 0 : toy_gate(loss, valid, toy_scalar(step));
    update(policy_.clip ? toy_clip(sum) : gate, toy_scalar(step));
    return {loss, valid, wrap(sum), toy_clip(sum), gate};
  }

  ToyResult result(std::vector<ToyRecord> history, int rank) const {
    return {std::move(history), shards(masters_, rank),
            policy_.keep_gradients ? shards(gradients_, rank) : std::vector<Lanes>{}};
  }

 private:
  using Lanes = std::vector<float>;

  std::vector<Lanes> shards(const std::vector<Lanes>& whole, int rank) const {
    std::vector<Lanes> result;
    for (int u = 0; u < units_; ++u) {
      Lanes& shard = result.emplace_back();
      for (const Segment& segment : layout_.units[u].segments) {
        const auto begin = whole[u].begin() + segment.offset + rank % layout_.world * segment.shard_elements;
        shard.insert(shard.end(), begin, begin + segment.shard_elements);
      }
    }
    return result;
  }

  float seen(int unit, int lane) const {
    float sum = 0;
    for (size_t j = static_cast<size_t>(lane); j < masters_[unit].size(); j += kToyWidth)
      sum += toy_weighted(masters_[unit][j], static_cast<int64_t>(j));
    return sum;
  }

  void add_gradients(int unit, const Lanes& flow, const Lanes& in) {
    for (const Slice& slice : layout_.units[unit].slices)
      for (int64_t j = slice.offset; j < slice.offset + slice.elements; ++j)
        gradients_[unit][j] +=
            toy_gradient(flow[j % kToyWidth], in[j % kToyWidth], unit > 0 ? masters_[unit][j] : 0);
  }

  // Adds the gradients of a micro-batch of a rank; returns its loss.
  float run_passes(const Lanes& tokens, float valid) {
    const int head = units_ - 1;
    std::vector<Lanes> values{tokens}, kept;  // values[u]: input of unit u
    for (int u = 0; u < head; ++u) {
      Lanes out(kToyWidth), keep(kToyWidth);
      for (int i = 0; i < kToyWidth; ++i) out[i] = toy_forward(values[u][i], keep[i] = wrap(seen(u, i)));
      values.push_back(out);
      kept.push_back(keep);
    }
    Lanes flow(kToyWidth);
    float loss = 0;
    for (int i = 0; i < kToyWidth; ++i) loss += flow[i] = toy_head(values[head][i], seen(head, i), valid);
    add_gradients(head, flow, values[head]);
    for (int i = 0; i < kToyWidth; ++i) flow[i] = toy_head_backward(flow[i], seen(head, i));
    for (int u = head - 1; u >= 0; --u) {
      add_gradients(u, flow, values[u]);
      for (int i = 0; i < kToyWidth; ++i)
        flow[i] = toy_backward(flow[i], values[u + 1][i], kept[u][i], seen(u, i));
    }
    return loss;
  }

  void update(float factor, float scalar) {
    for (int u = 0; u < units_; ++u)
      for (size_t i = 0; i < masters_[u].size(); ++i) {
        const auto updated =
            toy_update(masters_[u][i], moments1_[u][i], moments2_[u][i], gradients_[u][i], factor, scalar);
        masters_[u][i] = updated[0];
        moments1_[u][i] = updated[1];
        moments2_[u][i] = updated[2];
      }
  }

  const Layout& layout_;
  const Policy& policy_;
  int units_ = 0, ranks_ = 0;
  std::vector<Lanes> masters_, moments1_, moments2_, gradients_;
};

}  // namespace

ToyResult toy_reference(const Layout& layout, const Policy& policy, int rank, int steps, int restart_at) {
  Reference reference(layout, policy);
  std::vector<ToyRecord> history;
  for (int step = 0; step < steps; ++step) {
    if (step == restart_at) reference.restart();
    history.push_back(reference.step(step));
  }
  return reference.result(std::move(history), rank);
}

}  // namespace minillm::shard
