// Steps without structure, for tests of the memory plan: any streams, any pieces, any accesses, and gathers
// for the next step.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "fixtures.h"

namespace minillm::shard {

struct RandomStep {
  Layout layout = make_layout(make_units(2, 20), 2);
  DeclaredProgram program;
  Schedule schedule;
};

class RandomStepMaker {
 public:
  explicit RandomStepMaker(unsigned seed) : random_(seed) {}

  RandomStep make() && {
    Schedule& schedule = step_.schedule;
    const int streams = 1 + below(kStreamCount), operations = 4 + below(40);
    for (int i = 0; i < operations; ++i)
      schedule.operations.push_back(
          {.kind = OpKind::kForward, .unit = below(4), .stream = static_cast<StreamId>(below(streams))});
    schedule.reduce_type = below(2) ? DType::kBf16 : DType::kFp32;
    add_links(below(3 * operations));
    const auto slots = [&](RegionKind kind, std::vector<Slot>& slots, int most) {
      for (int i = below(most + 1); i > 0; --i) {
        slots.push_back({0, 1 + below(900)});
        touch({kind, static_cast<int>(slots.size()) - 1});
      }
    };
    slots(RegionKind::kGradientSlot, schedule.gradient_slots, 4);
    slots(RegionKind::kGradientShard, schedule.shard_slots, 4);
    if ((schedule.wire_elements = below(500)) > 0) touch({RegionKind::kWireSlot});
    if ((schedule.reduced_elements = below(500)) > 0) touch({RegionKind::kReducedPiece});
    add_buffers(below(25));
    for (int i = below(5); i > 0; --i) add_weight_slot();
    return std::move(step_);
  }

 private:
  int below(int n) { return n <= 0 ? 0 : static_cast<int>(random_() % static_cast<unsigned>(n)); }
  Operation& operation(int i) { return step_.schedule.operations[static_cast<size_t>(i)]; }
  int count() const { return static_cast<int>(step_.schedule.operations.size()); }

  // Whole-run memory that many touch, so that waits order streams, more or less of them.
  void add_links(int links) {
    for (int i = 0; i < links; ++i) {
      Operation& linked = operation(below(count()));
      (below(2) ? linked.reads : linked.writes).push_back({RegionKind::kParameterShard, below(4)});
    }
  }

  // Some accesses within a part of the step, on any of its streams.
  void touch(const Region& region) {
    const int first = below(count()), length = 1 + below(below(3) ? 4 : count());
    for (int accesses = 1 + below(4); accesses > 0; --accesses) {
      Operation& touching = operation(std::min(count() - 1, first + below(length)));
      if (!touching.next_step) (below(2) ? touching.reads : touching.writes).push_back(region);
    }
  }

  void add_buffers(int buffers) {
    for (int i = 0; i < buffers; ++i) {
      step_.program.specs.push_back(
          {numbered("buffer", i), below(8) ? below(5000) : 0, static_cast<Purpose>(5 + below(4))});
      if (below(10)) touch({RegionKind::kBuffer, i});
    }
  }

  // Read in this step, and as often as not gathered for the next one once that is over.
  void add_weight_slot() {
    const Region slot{RegionKind::kWeightSlot, static_cast<int>(step_.schedule.weight_slots.size())};
    step_.schedule.weight_slots.push_back({0, 1 + below(900)});
    touch(slot);
    if (below(2)) return;
    int last = 0;
    for (int i = 0; i < count(); ++i)
      for (const auto* regions : {&operation(i).reads, &operation(i).writes})
        if (std::find(regions->begin(), regions->end(), slot) != regions->end()) last = i;
    for (int gathers = 1 + below(2); gathers > 0; --gathers) {
      last += 1 + below(count() - last);
      Operation gather{.kind = OpKind::kGather,
                       .unit = below(4),
                       .stream = static_cast<StreamId>(below(kStreamCount)),
                       .next_step = true};
      gather.reads = {{RegionKind::kParameterShard, gather.unit}};
      gather.writes = {slot};
      auto& operations = step_.schedule.operations;
      operations.insert(operations.begin() + std::min(last, count()), std::move(gather));
    }
  }

  std::mt19937 random_;
  RandomStep step_;
};

inline RandomStep make_random_step(unsigned seed) {
  return RandomStepMaker(seed).make();
}

}  // namespace minillm::shard
