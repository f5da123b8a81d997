#include "toy.h"

namespace minillm::shard {
namespace {

// Whole parameters and the ranks one after another.
class Reference {
 public:
  explicit Reference(const Layout& layout) : layout_(layout), units_(static_cast<int>(layout.units.size())) {
    for (int u = 0; u < units_; ++u) {
      const UnitLayout& unit = layout.units[u];
      const std::vector<float> zeros(static_cast<size_t>(unit.padded_elements));
      masters_.push_back(zeros);
      moments1_.push_back(zeros);
      moments2_.push_back(zeros);
      for (const Slice& slice : unit.slices)
        for (int64_t j = slice.offset; j < slice.offset + slice.elements; ++j)
          masters_[u][j] = toy_initial(u, j);
    }
  }

  ToyRecord step(int step) {
    gradients_.clear();
    for (const std::vector<float>& master : masters_) gradients_.emplace_back(master.size());
    float valid = 0, loss = 0, gradient_sum = 0;
    for (int rank = 0; rank < layout_.world; ++rank) valid += toy_valid(step, rank);
    for (int rank = 0; rank < layout_.world; ++rank) loss += run_rank(step, rank, valid);
    for (const std::vector<float>& unit : gradients_)
      for (float gradient : unit) gradient_sum += gradient;
    const float norm = wrap(loss + gradient_sum), factor = 1 + wrap(gradient_sum);
    update(norm, factor);
    return {loss, gradient_sum, norm, factor, valid};
  }

  std::vector<std::vector<float>> shards(int rank) const {
    std::vector<std::vector<float>> result;
    for (int u = 0; u < units_; ++u) {
      const auto begin = masters_[u].begin() + rank * layout_.units[u].shard_elements;
      result.emplace_back(begin, begin + layout_.units[u].shard_elements);
    }
    return result;
  }

 private:
  using Lanes = std::vector<float>;

  float seen(int unit, int lane) const {
    float sum = 0;
    for (size_t j = static_cast<size_t>(lane); j < masters_[unit].size(); j += kToyWidth)
      sum += toy_weighted(masters_[unit][j], static_cast<int64_t>(j));
    return sum;
  }

  void add_gradients(int unit, const Lanes& flow, const Lanes& in) {
    for (const Slice& slice : layout_.units[unit].slices)
      for (int64_t j = slice.offset; j < slice.offset + slice.elements; ++j) {
        const float weight = unit > 0 ? masters_[unit][j] : 0;
        gradients_[unit][j] += wrap(flow[j % kToyWidth] + 2 * in[j % kToyWidth] + weight);
      }
  }

  // Adds the rank's gradients; returns its loss.
  float run_rank(int step, int rank, float valid) {
    std::vector<Lanes> values(1, Lanes(kToyWidth));  // values[u]: input of unit u
    for (int i = 0; i < kToyWidth; ++i) values[0][i] = toy_token(step, rank, i);
    for (int u = 0; u + 1 < units_; ++u) {
      Lanes out(kToyWidth);
      for (int i = 0; i < kToyWidth; ++i) out[i] = wrap(3 * values[u][i] + wrap(seen(u, i)));
      values.push_back(out);
    }
    Lanes flow(kToyWidth);
    float loss = 0;
    for (int i = 0; i < kToyWidth; ++i)
      loss += flow[i] = wrap(values.back()[i] + seen(units_ - 1, i) + valid);
    for (int u = units_ - 1; u >= 0; --u) {
      add_gradients(u, flow, values[u]);
      if (u == units_ - 1) continue;
      for (int i = 0; i < kToyWidth; ++i) flow[i] = wrap(2 * wrap(flow[i] + values[u + 1][i]) + seen(u, i));
    }
    return loss;
  }

  void update(float norm, float factor) {
    for (int u = 0; u < units_; ++u)
      for (size_t i = 0; i < masters_[u].size(); ++i) {
        const float gradient = gradients_[u][i];
        moments1_[u][i] = wrap(moments1_[u][i] + gradient);
        moments2_[u][i] = wrap(moments2_[u][i] + gradient * norm);
        masters_[u][i] = wrap(masters_[u][i] + gradient * factor + moments1_[u][i] + 2 * moments2_[u][i]);
      }
  }

  const Layout& layout_;
  int units_ = 0;
  std::vector<std::vector<float>> masters_, moments1_, moments2_, gradients_;
};

}  // namespace

ToyResult toy_reference(const Layout& layout, int rank, int steps) {
  Reference reference(layout);
  ToyResult result;
  for (int step = 0; step < steps; ++step) result.history.push_back(reference.step(step));
  result.masters = reference.shards(rank);
  return result;
}

}  // namespace minillm::shard
