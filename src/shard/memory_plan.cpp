#include "shard/memory_plan.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "core/format.h"
#include "shard/lifetimes.h"
#include "shard/placement.h"

namespace minillm::shard {
namespace {

// What operations name in their regions, by slot or buffer.
struct Piece {
  std::string name;
  Purpose purpose{};
  int64_t bytes = 0;

  // Whether its content outlasts the step, so that nobody else gets its place.
  bool keeps_place() const { return purpose == Purpose::kInputs || purpose == Purpose::kWorkspace; }
};

// The pieces that operations name by one kind of region: `first` and the following ones.
struct PieceRange {
  RegionKind kind{};
  int first = 0;
  int count = 0;
};

class Planner {
 public:
  Planner(const Schedule& schedule, const Layout& layout, DType parameter_type, DType moment_type)
      : schedule_(schedule),
        layout_(layout),
        parameter_type_(parameter_type),
        moment_type_(moment_type),
        operations_(static_cast<int>(schedule.operations.size())) {}

  MemoryPlan plan(const std::vector<std::vector<Wait>>& waits, const Program& program) && {
    plan_shards();
    plan_scalars();
    list_slots();
    list_buffers(program.buffers());
    place(order_of(schedule_, waits));
    plan_.weight_slot = offsets(RegionKind::kWeightSlot);
    plan_.gradient_slot = offsets(RegionKind::kGradientSlot);
    plan_.shard_slot = offsets(RegionKind::kGradientShard);
    plan_.buffer = offsets(RegionKind::kBuffer);
    if (schedule_.wire_elements > 0) plan_.wire = offsets(RegionKind::kWireSlot).front();
    if (schedule_.reduced_elements > 0) plan_.reduced_piece = offsets(RegionKind::kReducedPiece).front();
    name_peak();
    return std::move(plan_);
  }

 private:
  // A place for the whole run.
  int64_t keep(std::string name, Purpose purpose, int64_t bytes) {
    const int64_t offset = plan_.bytes;
    plan_.placements.push_back({std::move(name), purpose, offset, bytes, 0, std::max(0, operations_ - 1)});
    plan_.bytes += round_up(bytes, kPlanAlignment);
    return offset;
  }

  void plan_shards() {
    for (const UnitLayout& unit : layout_.units) {
      const int64_t n = unit.shard_elements;
      const auto parameters = [&](const char* name, int64_t element_bytes) {
        return keep(unit.name + name, Purpose::kParameters, n * element_bytes);
      };
      const int64_t rest = size_of(DType::kFp32) - size_of(parameter_type_);  // of a master weight
      plan_.parameter_shard.push_back(parameters(" parameter shard", size_of(parameter_type_)));
      plan_.lower_half.push_back(rest > 0 ? parameters(" lower halves", rest) : -1);
      plan_.moment1.push_back(keep(unit.name + " moment 1", Purpose::kMoments, n * size_of(moment_type_)));
      plan_.moment2.push_back(keep(unit.name + " moment 2", Purpose::kMoments, n * size_of(moment_type_)));
    }
  }

  void plan_scalars() {
    const auto floats = [&](const char* name, int64_t count) {
      return keep(name, Purpose::kWorkspace, count * size_of(DType::kFp32));
    };
    plan_.valid_count = floats("valid count", 1);
    plan_.loss_sum = floats("loss sums", schedule_.micro_batches);
    plan_.loss_total = floats("loss total", 2);
    plan_.gate = floats("gate", 2);
    plan_.norm_partials =
        floats("norm partials", static_cast<int64_t>(layout_.units.size()) * layout_.most_segments());
    plan_.norm_total = floats("norm total", 1);
    plan_.clip = floats("clip", 2);
  }

  void list(RegionKind kind, std::vector<Piece> pieces) {
    ranges_.push_back({kind, static_cast<int>(pieces_.size()), static_cast<int>(pieces.size())});
    std::move(pieces.begin(), pieces.end(), std::back_inserter(pieces_));
  }

  void list_slots() {
    const auto all = [&](RegionKind kind, const char* name, Purpose purpose, const std::vector<Slot>& slots,
                         DType type) {
      std::vector<Piece> pieces;
      for (const Slot& slot : slots)
        pieces.push_back({name + std::to_string(pieces.size()), purpose, slot.elements * size_of(type)});
      list(kind, std::move(pieces));
    };
    all(RegionKind::kWeightSlot, "weight slot ", Purpose::kWeightSlots, schedule_.weight_slots,
        parameter_type_);
    all(RegionKind::kGradientSlot, "gradient slot ", Purpose::kGradientSlots, schedule_.gradient_slots,
        DType::kFp32);
    all(RegionKind::kGradientShard, "shard slot ", Purpose::kGradients, schedule_.shard_slots, DType::kFp32);
    const auto only = [&](RegionKind kind, const char* name, Purpose purpose, int64_t elements) {
      std::vector<Piece> pieces;
      if (elements > 0) pieces.push_back({name, purpose, elements * size_of(schedule_.reduce_type)});
      list(kind, std::move(pieces));
    };
    only(RegionKind::kWireSlot, "wire slot", Purpose::kGradientSlots, schedule_.wire_elements);
    only(RegionKind::kReducedPiece, "reduced piece", Purpose::kGradients, schedule_.reduced_elements);
  }

  void list_buffers(const std::vector<BufferSpec>& buffers) {
    std::vector<Piece> pieces;
    for (const BufferSpec& buffer : buffers) {
      if (buffer.bytes < 0)
        throw InternalError("plan_memory: buffer '" + buffer.name + "' has " + std::to_string(buffer.bytes) +
                            " bytes; a size is 0 or more");
      pieces.push_back({buffer.name, buffer.purpose, buffer.bytes});
    }
    list(RegionKind::kBuffer, std::move(pieces));
  }

  std::vector<std::vector<Touch>> touches() const {
    std::vector<std::vector<Touch>> found(schedule_.operations.size());
    for (int i = 0; i < operations_; ++i) {
      const Operation& operation = schedule_.operations[i];
      const auto add = [&](const Region& region, bool writes) {
        const auto range = std::find_if(ranges_.begin(), ranges_.end(),
                                        [&](const PieceRange& r) { return r.kind == region.kind; });
        if (range == ranges_.end()) return;
        if (region.index < 0 || region.index >= range->count)
          throw InternalError("plan_memory: operation " + std::to_string(i) + " (" +
                              describe(operation, layout_.unit_names()) + ") names " + describe(region, {}) +
                              " (index " + std::to_string(region.index) + "), but there are " +
                              std::to_string(range->count) +
                              " of that kind; plan the schedule with the program that it was built for");
        const int piece = range->first + region.index;
        if (!pieces_[piece].keeps_place()) found[i].push_back({piece, writes});
      };
      for (const Region& region : operation.reads) add(region, false);
      for (const Region& region : operation.writes) add(region, true);
    }
    return found;
  }

  void place(const StepOrder& order) {
    const auto found = find_lives(schedule_, order, touches(), static_cast<int>(pieces_.size()));
    piece_offsets_.assign(pieces_.size(), -1);
    std::vector<int> placed;
    std::vector<Life> lives;
    std::vector<int64_t> bytes;
    for (int i = 0; i < static_cast<int>(pieces_.size()); ++i) {
      const Piece& piece = pieces_[i];
      if (piece.keeps_place()) {
        piece_offsets_[i] = keep(piece.name, piece.purpose, piece.bytes);
      } else if (found[i]) {
        placed.push_back(i);
        lives.push_back(*found[i]);
        bytes.push_back(round_up(piece.bytes, kPlanAlignment));
      }
    }
    const Arrangement arrangement = arrange(lives, bytes, order);
    for (size_t i = 0; i < placed.size(); ++i) {
      const Piece& piece = pieces_[placed[i]];
      const int64_t offset = piece_offsets_[placed[i]] = plan_.bytes + arrangement.offsets[i];
      const bool always = lives[i].last - lives[i].first >= operations_;
      plan_.placements.push_back({piece.name, piece.purpose, offset, piece.bytes,
                                  always ? 0 : lives[i].first % operations_,
                                  always ? operations_ - 1 : lives[i].last % operations_});
    }
    plan_.live_bytes = plan_.bytes + arrangement.live_bytes;
    plan_.bytes += arrangement.bytes;
  }

  std::vector<int64_t> offsets(RegionKind kind) const {
    const auto range =
        std::find_if(ranges_.begin(), ranges_.end(), [&](const PieceRange& r) { return r.kind == kind; });
    const auto begin = piece_offsets_.begin() + range->first;
    return {begin, begin + range->count};
  }

  void name_peak();

  const Schedule& schedule_;
  const Layout& layout_;
  DType parameter_type_, moment_type_;
  int operations_ = 0;
  std::vector<Piece> pieces_;
  std::vector<PieceRange> ranges_;
  std::vector<int64_t> piece_offsets_;  // -1: no place
  MemoryPlan plan_;
};

// Bytes in use at each operation, of one purpose or of all.
std::vector<int64_t> bytes_in_use(const std::vector<Placement>& placements, std::optional<Purpose> purpose) {
  int last = 0;
  for (const Placement& placement : placements) last = std::max({last, placement.first, placement.last});
  std::vector<int64_t> change(static_cast<size_t>(last) + 2);
  for (const Placement& placement : placements) {
    if (purpose && placement.purpose != *purpose) continue;
    change[placement.first] += placement.bytes;
    change[placement.last + 1] -= placement.bytes;
    if (placement.last < placement.first) change[0] += placement.bytes;
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  change.pop_back();
  return change;
}

void Planner::name_peak() {
  if (operations_ == 0) return;
  const std::vector<int64_t> live = bytes_in_use(plan_.placements, std::nullopt);
  const auto peak = std::max_element(live.begin(), live.end()) - live.begin();
  plan_.peak_operation = describe(schedule_.operations[peak], layout_.unit_names());
}

std::string table_row(const char* what, int64_t bytes, int64_t arena) {
  const double share = arena > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(arena) : 0.0;
  return format("%-16s %10.1f MB %6.1f %%", what, static_cast<double>(bytes) / 1e6, share);
}

}  // namespace

const char* name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::kParameters:
      return "parameters";
    case Purpose::kGradients:
      return "gradients";
    case Purpose::kMoments:
      return "moments";
    case Purpose::kWeightSlots:
      return "weight slots";
    case Purpose::kGradientSlots:
      return "gradient slots";
    case Purpose::kActivations:
      return "activations";
    case Purpose::kScratch:
      return "scratch";
    case Purpose::kInputs:
      return "inputs";
    case Purpose::kWorkspace:
      return "workspace";
  }
  throw InternalError("name_of: purpose " + std::to_string(static_cast<int>(purpose)) + " is unknown");
}

int64_t MemoryPlan::peak_bytes(Purpose purpose) const {
  const std::vector<int64_t> live = bytes_in_use(placements, purpose);
  return *std::max_element(live.begin(), live.end());
}

std::string MemoryPlan::table() const {
  std::string text;
  for (Purpose purpose : kPurposes) text += table_row(name_of(purpose), peak_bytes(purpose), bytes) + "\n";
  text += table_row("arena", bytes, bytes);
  if (!peak_operation.empty()) text += ", most in use at: " + peak_operation;
  return text + "\n";
}

MemoryPlan plan_memory(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                       const Layout& layout, const Program& program, DType parameter_type,
                       DType moment_type) {
  return Planner(schedule, layout, parameter_type, moment_type).plan(waits, program);
}

}  // namespace minillm::shard
