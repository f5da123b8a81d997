#include "shard/schedule.h"

#include "core/error.h"

namespace minillm::shard {
namespace {

std::string unit_name(int unit, const std::vector<std::string>& unit_names) {
  const auto index = static_cast<size_t>(unit);
  return unit >= 0 && index < unit_names.size() ? unit_names[index] : "unit " + std::to_string(unit);
}

const char* verb(OpKind kind) {
  switch (kind) {
    case OpKind::kBegin:
      return "begin";
    case OpKind::kGather:
      return "gather";
    case OpKind::kForward:
      return "forward";
    case OpKind::kHeadLoss:
      return "loss";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kReduceScatter:
      return "reduce-scatter";
    case OpKind::kAllReduceCount:
      return "all-reduce count";
    case OpKind::kSquareNorm:
      return "square norm";
    case OpKind::kCollectStats:
      return "collect stats";
    case OpKind::kAllReduceStats:
      return "all-reduce stats";
    case OpKind::kClip:
      return "clip";
    case OpKind::kUpdate:
      return "update";
    case OpKind::kReadBack:
      return "read back";
  }
  throw InternalError("describe: operation kind " + std::to_string(static_cast<int>(kind)) + " is unknown");
}

}  // namespace

const char* name_of(StreamId stream) {
  switch (stream) {
    case StreamId::kCompute:
      return "compute";
    case StreamId::kGather:
      return "gather";
    case StreamId::kReduce:
      return "reduce";
  }
  throw InternalError("name_of: stream " + std::to_string(static_cast<int>(stream)) + " is unknown");
}

std::string describe(const Operation& operation, const std::vector<std::string>& unit_names) {
  std::string text = verb(operation.kind);
  if (operation.unit >= 0) text.append(" ").append(unit_name(operation.unit, unit_names));
  if (operation.weight_slot >= 0) {
    const std::string slot = "weight slot " + std::to_string(operation.weight_slot);
    text += operation.kind == OpKind::kGather ? " -> " + slot : " (" + slot + ")";
  }
  if (operation.gradient_slot >= 0) {
    text += operation.kind == OpKind::kReduceScatter ? " <- " : " -> ";
    text += "gradient slot " + std::to_string(operation.gradient_slot);
  }
  return text;
}

std::string describe(const Region& region, const std::vector<std::string>& unit_names) {
  const auto of_unit = [&](const char* what) { return what + unit_name(region.index, unit_names); };
  const auto numbered = [&](const char* what) { return what + std::to_string(region.index); };
  switch (region.kind) {
    case RegionKind::kParameterShard:
      return of_unit("parameter shard of ");
    case RegionKind::kOptimizerShard:
      return of_unit("optimizer shard of ");
    case RegionKind::kGradientShard:
      return of_unit("gradient shard of ");
    case RegionKind::kWeightSlot:
      return numbered("weight slot ");
    case RegionKind::kGradientSlot:
      return numbered("gradient slot ");
    case RegionKind::kBuffer:
      return numbered("buffer ");
    case RegionKind::kValidCount:
      return "valid count";
    case RegionKind::kLossSum:
      return "loss sum";
    case RegionKind::kNormPartial:
      return of_unit("norm partial of ");
    case RegionKind::kStats:
      return "stats";
    case RegionKind::kClip:
      return "clip";
  }
  throw InternalError("describe: region kind " + std::to_string(static_cast<int>(region.kind)) +
                      " is unknown");
}

}  // namespace minillm::shard
