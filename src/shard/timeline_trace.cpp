#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "shard/timeline.h"

namespace minillm::shard {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMicroseconds = 1e6;

/// Phases of the format: a slice with its length, the ends of an arrow, a name.
Json event(const char* phase, StreamId stream, const std::string& name) {
  return {{"ph", phase}, {"pid", 0}, {"tid", static_cast<int>(stream)}, {"name", name}};
}

Json named(const char* what, StreamId stream, Json arguments) {
  Json json = event("M", stream, what);
  json["args"] = std::move(arguments);
  return json;
}

Json arguments_of(const Operation& operation, const OperationCost& cost, const std::vector<Wait>& waits,
                  const Schedule& schedule, const std::vector<std::string>& unit_names) {
  Json arguments = Json::object();
  const auto add = [&](const char* key, int value) {
    if (value >= 0) arguments[key] = value;
  };
  add("unit", operation.unit);
  add("segment", operation.segment);
  add("weight_slot", operation.weight_slot);
  add("gradient_slot", operation.gradient_slot);
  add("shard_slot", operation.shard_slot);
  if (cost.wire_bytes > 0) arguments["wire_bytes"] = cost.wire_bytes;
  for (const Wait& wait : waits)
    arguments["waits_for"].push_back(
        describe(schedule.operations[static_cast<size_t>(wait.operation)], unit_names) +
        (wait.steps_back > 0 ? ", of the step before" : ""));
  return arguments;
}

/// An arrow from the end of `from` to the start of `to`. Its ends belong to the slices that they lie in, so
/// the first is a little before that slice's end.
void add_arrow(Json& events, int id, const Operation& from, const OperationTime& from_time,
               const Operation& to, const OperationTime& to_time, double origin_s) {
  constexpr double kInsideSeconds = 1e-9;
  Json tail = event("s", from.stream, "wait"), head = event("f", to.stream, "wait");
  for (Json* end : {&tail, &head}) {
    (*end)["cat"] = "wait";
    (*end)["id"] = id;
  }
  tail["ts"] = (std::max(from_time.start_s, from_time.end_s - kInsideSeconds) - origin_s) * kMicroseconds;
  head["ts"] = (to_time.start_s - origin_s) * kMicroseconds;
  head["bp"] = "e";
  events.push_back(std::move(tail));
  events.push_back(std::move(head));
}

}  // namespace

std::string chrome_trace(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                         const std::vector<OperationCost>& costs, const Timeline& timeline,
                         const std::vector<std::string>& unit_names) {
  const std::vector<Operation>& operations = schedule.operations;
  const std::vector<OperationTime>& times = timeline.operations;
  if (waits.size() != operations.size() || costs.size() != operations.size() ||
      times.size() != operations.size() || times.empty())
    throw InternalError("chrome_trace: " + std::to_string(operations.size()) + " operations, " +
                        std::to_string(waits.size()) + " of waits, " + std::to_string(costs.size()) +
                        " of costs and " + std::to_string(times.size()) +
                        " of times; these must be equal and above 0");
  const double origin_s = std::ranges::min(times, {}, &OperationTime::start_s).start_s;
  Json events = Json::array();
  for (int s = 0; s < kStreamCount; ++s) {
    const auto stream = static_cast<StreamId>(s);
    if (std::ranges::count(operations, stream, &Operation::stream) == 0) continue;
    events.push_back(named("thread_name", stream, {{"name", name_of(stream)}}));
    events.push_back(named("thread_sort_index", stream, {{"sort_index", s}}));
  }
  int arrows = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    Json slice = event("X", operations[i].stream, describe(operations[i], unit_names));
    slice["cat"] = name_of(operations[i].kind);
    slice["ts"] = (times[i].start_s - origin_s) * kMicroseconds;
    slice["dur"] = (times[i].end_s - times[i].start_s) * kMicroseconds;
    slice["args"] = arguments_of(operations[i], costs[i], waits[i], schedule, unit_names);
    events.push_back(std::move(slice));
    for (const Wait& wait : waits[i]) {
      if (wait.steps_back > 0) continue;
      const auto from = static_cast<size_t>(wait.operation);
      add_arrow(events, arrows++, operations[from], times[from], operations[i], times[i], origin_s);
    }
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump(1) + "\n";
}

}  // namespace minillm::shard
