#include "shard/schedule.h"

#include "core/error.h"

namespace minillm::shard {
namespace {

std::string unit_name(int unit, const std::vector<std::string>& unit_names) {
  const auto index = static_cast<size_t>(unit);
  return unit >= 0 && index < unit_names.size() ? unit_names[index] : "unit " + std::to_string(unit);
}

std::string place(const char* what, int number) {
  return std::string(what) + " slot " + std::to_string(number);
}

std::string places_of(const Operation& operation) {
  std::string text;
  if (operation.weight_slot >= 0) {
    const std::string slot = place("weight", operation.weight_slot);
    text += operation.kind == OpKind::kGather ? " -> " + slot : " (" + slot + ")";
  }
  if (operation.gradient_slot >= 0)
    text += (makes_gradients(operation.kind) ? " -> " : " <- ") + place("gradient", operation.gradient_slot);
  if (operation.shard_slot >= 0) {
    const bool writes = makes_gradients(operation.kind) || operation.kind == OpKind::kReduceScatter ||
                        operation.kind == OpKind::kAccumulate;
    text += (writes ? " -> " : " (") + place("shard", operation.shard_slot) + (writes ? "" : ")");
  }
  return text;
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
    case StreamId::kReplicate:
      return "replicate";
    case StreamId::kUpdate:
      return "update";
    case StreamId::kCopy:
      return "copy";
  }
  throw InternalError("name_of: stream " + std::to_string(static_cast<int>(stream)) + " is unknown");
}

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kUpload:
      return "upload";
    case OpKind::kSetStep:
      return "set step";
    case OpKind::kBegin:
      return "begin";
    case OpKind::kAllReduceCount:
      return "all-reduce count";
    case OpKind::kGather:
      return "gather";
    case OpKind::kForward:
      return "forward";
    case OpKind::kHeadLoss:
      return "loss";
    case OpKind::kRecompute:
      return "recompute";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kBackwardInput:
      return "backward input";
    case OpKind::kBackwardWeight:
      return "backward weight";
    case OpKind::kCast:
      return "cast";
    case OpKind::kReduceScatter:
      return "reduce-scatter";
    case OpKind::kAccumulate:
      return "accumulate";
    case OpKind::kAllReduceGradient:
      return "all-reduce";
    case OpKind::kSquareNorm:
      return "square norm";
    case OpKind::kCollectLoss:
      return "collect loss";
    case OpKind::kAllReduceLoss:
      return "all-reduce loss";
    case OpKind::kGate:
      return "gate";
    case OpKind::kCollectNorm:
      return "collect norm";
    case OpKind::kAllReduceNorm:
      return "all-reduce norm";
    case OpKind::kClip:
      return "clip";
    case OpKind::kUpdate:
      return "update";
    case OpKind::kReadBack:
      return "read back";
    case OpKind::kCopyIn:
      return "copy in";
    case OpKind::kCopyOut:
      return "copy out";
    case OpKind::kReduceCopyIn:
      return "reduce copy in";
  }
  throw InternalError("name_of: operation kind " + std::to_string(static_cast<int>(kind)) + " is unknown");
}

bool is_collective(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduceCount:
    case OpKind::kGather:
    case OpKind::kReduceScatter:
    case OpKind::kAllReduceGradient:
    case OpKind::kAllReduceLoss:
    case OpKind::kAllReduceNorm:
      return true;
    default:
      return false;
  }
}

bool touches_host(OpKind kind) {
  return kind == OpKind::kUpload || kind == OpKind::kSetStep || kind == OpKind::kReadBack;
}

bool makes_gradients(OpKind kind) {
  return kind == OpKind::kHeadLoss || kind == OpKind::kBackward || kind == OpKind::kBackwardInput ||
         kind == OpKind::kBackwardWeight;
}

std::string describe(const Operation& operation, const std::vector<std::string>& unit_names) {
  std::string text = name_of(operation.kind);
  if (operation.unit >= 0) text.append(" ").append(unit_name(operation.unit, unit_names));
  if (operation.segment >= 0) text.append(" segment ").append(std::to_string(operation.segment));
  if (operation.micro_batch > 0)
    text.append(" of micro-batch ").append(std::to_string(operation.micro_batch));
  text += places_of(operation);
  if (operation.accumulate) text += ", added";
  if (operation.next_step) text += ", for the next step";
  return text;
}

std::string describe(const Region& region, const std::vector<std::string>& unit_names) {
  const auto with_part = [&](std::string text, const char* part) {
    return region.part > 0 ? text.append(part).append(std::to_string(region.part)) : text;
  };
  const auto of_unit = [&](const char* what) {
    return with_part(what + unit_name(region.index, unit_names), " segment ");
  };
  const auto numbered = [&](const char* what) {
    return with_part(what + std::to_string(region.index), " part ");
  };
  switch (region.kind) {
    case RegionKind::kParameterShard:
      return of_unit("parameter shard of ");
    case RegionKind::kOptimizerShard:
      return of_unit("optimizer shard of ");
    case RegionKind::kGradientShard:
      return numbered("shard slot ");
    case RegionKind::kWeightSlot:
      return numbered("weight slot ");
    case RegionKind::kGradientSlot:
      return numbered("gradient slot ");
    case RegionKind::kWireSlot:
      return "wire slot";
    case RegionKind::kReducedPiece:
      return "reduced piece";
    case RegionKind::kBuffer:
      return numbered("buffer ");
    case RegionKind::kValidCount:
      return "valid count";
    case RegionKind::kLossSum:
      return numbered("loss sum ");
    case RegionKind::kLossTotal:
      return "loss total";
    case RegionKind::kGate:
      return "gate";
    case RegionKind::kNormPartial:
      return of_unit("norm partial of ");
    case RegionKind::kNormTotal:
      return "norm total";
    case RegionKind::kClip:
      return "clip";
  }
  throw InternalError("describe: region kind " + std::to_string(static_cast<int>(region.kind)) +
                      " is unknown");
}

}  // namespace minillm::shard
