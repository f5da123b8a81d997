#include "memory_replay.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace minillm::shard {
namespace {

constexpr int kSteps = 4;
constexpr int kNobody = -1;

struct Piece {
  std::string name;
  int64_t offset = 0;
  int64_t bytes = 0;
  bool whole_run = false;
};

// Bytes that belong to the same pieces.
struct Cell {
  std::pair<int, int> owner{kNobody, 0};               // piece, and step whose work it holds
  std::map<int, std::vector<int>> last_time_of_piece;  // by stream
};

class Replay {
 public:
  Replay(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits, const Layout& layout,
         const std::vector<BufferSpec>& buffers, DType parameter_type, DType moment_type,
         const MemoryPlan& plan)
      : schedule_(schedule), waits_(waits), plan_(plan) {
    add_shards(layout, parameter_type, moment_type);
    add_scalars(layout);
    add_slots(parameter_type);
    for (size_t i = 0; i < buffers.size(); ++i)
      add({RegionKind::kBuffer, static_cast<int>(i)},
          {buffers[i].name, plan_.buffer[i], buffers[i].bytes,
           buffers[i].purpose == Purpose::kInputs || buffers[i].purpose == Purpose::kWorkspace});
  }

  std::vector<std::string> faults() {
    drop_unnamed();
    cut_into_cells();
    give_whole_run_pieces_their_cells();
    run();
    return {faults_.begin(), faults_.end()};
  }

 private:
  // Regions of the same kind and index are one piece, whatever their part.
  void add(Region region, Piece piece) {
    pieces_of_[{region.kind, region.index}].push_back(static_cast<int>(pieces_.size()));
    pieces_.push_back(std::move(piece));
  }

  void add_shards(const Layout& layout, DType parameter_type, DType moment_type) {
    for (int u = 0; u < static_cast<int>(layout.units.size()); ++u) {
      const UnitLayout& unit = layout.units[u];
      const auto shard = [&](const char* what, int64_t offset, DType type) {
        return Piece{unit.name + what, offset, unit.shard_elements * size_of(type), true};
      };
      const Region optimizer{RegionKind::kOptimizerShard, u}, parameters{RegionKind::kParameterShard, u};
      add(parameters, shard(" parameters", plan_.parameter_shard[u], parameter_type));
      if (parameter_type != DType::kFp32)
        add(optimizer, shard(" lower halves", plan_.lower_half[u], parameter_type));
      add(optimizer, shard(" moment 1", plan_.moment1[u], moment_type));
      add(optimizer, shard(" moment 2", plan_.moment2[u], moment_type));
    }
  }

  void add_scalars(const Layout& layout) {
    const auto floats = [&](RegionKind kind, const char* name, int64_t offset, int64_t count) {
      add({kind}, {name, offset, 4 * count, true});
    };
    floats(RegionKind::kValidCount, "valid count", plan_.valid_count, 1);
    floats(RegionKind::kLossSum, "loss sums", plan_.loss_sum, schedule_.micro_batches);
    floats(RegionKind::kLossTotal, "loss total", plan_.loss_total, 2);
    floats(RegionKind::kGate, "gate", plan_.gate, 2);
    floats(RegionKind::kNormPartial, "norm partials", plan_.norm_partials,
           static_cast<int64_t>(layout.units.size()) * layout.most_segments());
    floats(RegionKind::kNormTotal, "norm total", plan_.norm_total, 1);
    floats(RegionKind::kClip, "clip", plan_.clip, 2);
  }

  void add_slots(DType parameter_type) {
    const auto slots = [&](RegionKind kind, const std::vector<Slot>& slots,
                           const std::vector<int64_t>& offsets, DType type) {
      for (int i = 0; i < static_cast<int>(slots.size()); ++i)
        add({kind, i}, {describe(Region{kind, i}, {}), offsets[i], slots[i].elements * size_of(type), false});
    };
    slots(RegionKind::kWeightSlot, schedule_.weight_slots, plan_.weight_slot, parameter_type);
    slots(RegionKind::kGradientSlot, schedule_.gradient_slots, plan_.gradient_slot, DType::kFp32);
    slots(RegionKind::kGradientShard, schedule_.shard_slots, plan_.shard_slot, DType::kFp32);
    const auto element = size_of(schedule_.reduce_type);
    add({RegionKind::kWireSlot}, {"wire slot", plan_.wire, schedule_.wire_elements * element, false});
    add({RegionKind::kReducedPiece},
        {"reduced piece", plan_.reduced_piece, schedule_.reduced_elements * element, false});
  }

  static bool is_scalar(RegionKind kind) {
    return kind == RegionKind::kLossSum || kind == RegionKind::kNormPartial;
  }

  std::vector<int> pieces_of(const Operation& operation) const {
    std::set<int> found;
    for (const auto* regions : {&operation.reads, &operation.writes})
      for (const Region& region : *regions) {
        const auto pieces = pieces_of_.at({region.kind, is_scalar(region.kind) ? 0 : region.index});
        found.insert(pieces.begin(), pieces.end());
      }
    return {found.begin(), found.end()};
  }

  // Pieces that no operation touches need no place.
  void drop_unnamed() {
    std::set<int> named;
    for (const Operation& operation : schedule_.operations) named.merge(set_of(pieces_of(operation)));
    for (int i = 0; i < static_cast<int>(pieces_.size()); ++i)
      if (!named.contains(i) && !pieces_[i].whole_run) pieces_[i].bytes = 0;
  }
  static std::set<int> set_of(const std::vector<int>& list) { return {list.begin(), list.end()}; }

  void cut_into_cells() {
    std::set<int64_t> cuts;
    for (const Piece& piece : pieces_) {
      if (piece.bytes == 0) continue;
      if (piece.offset < 0 || piece.offset + piece.bytes > plan_.bytes || piece.offset % kPlanAlignment != 0)
        faults_.insert(piece.name + " lies at " + std::to_string(piece.offset) + " of " +
                       std::to_string(plan_.bytes));
      cuts.insert(piece.offset);
      cuts.insert(piece.offset + piece.bytes);
    }
    const std::vector<int64_t> sorted(cuts.begin(), cuts.end());
    cells_.resize(sorted.size());
    for (const Piece& piece : pieces_) {
      const auto index = [&](int64_t offset) {
        return static_cast<int>(std::lower_bound(sorted.begin(), sorted.end(), offset) - sorted.begin());
      };
      cells_of_.emplace_back(piece.bytes == 0 ? 0 : index(piece.offset),
                             piece.bytes == 0 ? 0 : index(piece.offset + piece.bytes));
    }
  }

  void give_whole_run_pieces_their_cells() {
    for (int piece = 0; piece < static_cast<int>(pieces_.size()); ++piece) {
      if (!pieces_[piece].whole_run) continue;
      born_.insert({piece, 0});
      for (int cell = cells_of_[piece].first; cell < cells_of_[piece].second; ++cell) {
        if (cells_[cell].owner.first != kNobody)
          faults_.insert(pieces_[piece].name + " overlaps " + pieces_[cells_[cell].owner.first].name);
        cells_[cell].owner = {piece, 0};
      }
    }
  }

  void run() {
    const int count = static_cast<int>(schedule_.operations.size());
    std::vector<std::vector<int>> now(kStreamCount, std::vector<int>(kStreamCount, 0));
    std::vector<std::vector<int>> after;  // each operation, by its place in the replay
    for (int step = 0; step < kSteps; ++step)
      for (int i = 0; i < count; ++i) {
        const int stream = static_cast<int>(schedule_.operations[i].stream);
        for (const Wait& wait : waits_[i]) {
          const int sender = (step - wait.steps_back) * count + wait.operation;
          if (sender < 0) continue;
          for (int s = 0; s < kStreamCount; ++s) now[stream][s] = std::max(now[stream][s], after[sender][s]);
        }
        const std::vector<int> seen = now[stream];
        ++now[stream][stream];
        after.push_back(now[stream]);
        access(step, i, seen);
      }
  }

  void access(int step, int index, const std::vector<int>& seen) {
    const Operation& operation = schedule_.operations[index];
    const int stream = static_cast<int>(operation.stream);
    for (int piece : pieces_of(operation)) {
      const std::pair<int, int> life{piece, pieces_[piece].whole_run ? 0 : step + operation.next_step};
      for (int at = cells_of_[piece].first; at < cells_of_[piece].second; ++at) {
        Cell& cell = cells_[at];
        check_owner(cell, life, operation);
        for (const auto& [other, times] : cell.last_time_of_piece)
          for (int s = 0; s < kStreamCount && other != piece; ++s)
            if (times[s] > seen[s])
              faults_.insert("'" + describe(operation, {}) + "' does not wait for the last access to " +
                             pieces_[other].name + " in the place of " + pieces_[piece].name);
        auto& times = cell.last_time_of_piece[piece];
        times.resize(kStreamCount);
        times[stream] = seen[stream] + 1;
      }
      born_.insert(life);
    }
  }

  void check_owner(Cell& cell, std::pair<int, int> life, const Operation& operation) {
    if (cell.owner == life) return;
    const bool took_for_good = cell.owner.first != kNobody && pieces_[cell.owner.first].whole_run;
    if (born_.contains(life) || took_for_good)
      faults_.insert("'" + describe(operation, {}) + "' finds " + pieces_[cell.owner.first].name +
                     " in the place of " + pieces_[life.first].name);
    cell.owner = life;
  }

  const Schedule& schedule_;
  const std::vector<std::vector<Wait>>& waits_;
  const MemoryPlan& plan_;
  std::vector<Piece> pieces_;
  std::map<std::pair<RegionKind, int>, std::vector<int>> pieces_of_;
  std::vector<std::pair<int, int>> cells_of_;  // by piece: first, and one past the last
  std::vector<Cell> cells_;
  std::set<std::pair<int, int>> born_;  // lives that have begun
  std::set<std::string> faults_;
};

}  // namespace

std::vector<std::string> find_memory_faults(const Schedule& schedule,
                                            const std::vector<std::vector<Wait>>& waits, const Layout& layout,
                                            const std::vector<BufferSpec>& buffers, DType parameter_type,
                                            DType moment_type, const MemoryPlan& plan) {
  return Replay(schedule, waits, layout, buffers, parameter_type, moment_type, plan).faults();
}

}  // namespace minillm::shard
