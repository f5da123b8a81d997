#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/format.h"
#include "shard/timeline.h"

namespace minillm::shard {
namespace {

constexpr char kIdle = '.', kBrief = ':';
constexpr double kRounding = 1e-6;  // of a column: not even brief
constexpr int kLabelColumns = 10;

char letter_of(OpKind kind) {
  switch (kind) {
    case OpKind::kGather:
      return 'G';
    case OpKind::kForward:
      return 'F';
    case OpKind::kHeadLoss:
      return 'L';
    case OpKind::kRecompute:
      return 'R';
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
      return 'B';
    case OpKind::kBackwardWeight:
      return 'W';
    case OpKind::kCast:
      return 'c';
    case OpKind::kReduceScatter:
      return 'S';
    case OpKind::kAccumulate:
      return 'a';
    case OpKind::kAllReduceGradient:
      return 'A';
    case OpKind::kSquareNorm:
      return 'n';
    case OpKind::kUpdate:
      return 'U';
    case OpKind::kCopyIn:
    case OpKind::kCopyOut:
    case OpKind::kReduceCopyIn:
      return 'k';
    default:
      return 's';
  }
}

const char* meaning_of(char letter) {
  switch (letter) {
    case 'G':
      return "gather";
    case 'F':
      return "forward";
    case 'L':
      return "loss";
    case 'R':
      return "recompute";
    case 'B':
      return "backward";
    case 'W':
      return "backward weight";
    case 'c':
      return "cast";
    case 'S':
      return "reduce-scatter";
    case 'a':
      return "accumulate";
    case 'A':
      return "all-reduce";
    case 'n':
      return "square norm";
    case 'U':
      return "update";
    case 'k':
      return "copy";
    case kBrief:
      return "less than half a column";
    default:
      return "scalars";
  }
}

char letter_of_unit(int unit, const std::vector<std::string>& names) {
  const auto u = static_cast<size_t>(unit);
  const std::string name = u < names.size() && !names[u].empty() ? names[u] : std::to_string(unit);
  const auto last = static_cast<unsigned char>(name.back()), first = static_cast<unsigned char>(name.front());
  return static_cast<char>(std::isdigit(last) ? last : std::toupper(first));
}

/// "unit: last digit, E embedding, H head".
std::string unit_legend(const std::vector<std::string>& names) {
  std::string text = "unit: last digit";
  for (const std::string& name : names) {
    if (name.empty() || std::isdigit(static_cast<unsigned char>(name.back()))) continue;
    text += std::string(", ") + letter_of_unit(0, {name}) + " " + name;
  }
  return text;
}

/// What a stream does in one column.
struct Column {
  double busy = 0, longest = 0;
  const Operation* operation = nullptr;  // of the longest
};

/// The columns of a stream, or nothing when it has no operations.
std::vector<Column> columns_of(const Schedule& schedule, const Timeline& timeline, StreamId stream,
                               int count) {
  std::vector<Column> columns;
  const double width = timeline.step_s / count;
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.stream != stream) continue;
    columns.resize(static_cast<size_t>(count));
    // What lies before or after the frame is in it as part of another step.
    const OperationTime& time = timeline.operations[i];
    double shift = -std::floor(time.end_s / timeline.step_s) * timeline.step_s;
    for (; time.start_s + shift < timeline.step_s; shift += timeline.step_s) {
      const double start = (time.start_s + shift) / width, end = (time.end_s + shift) / width;
      for (int c = std::max(0, static_cast<int>(start)); c < count && c < end; ++c) {
        const double part = std::min(end, c + 1.0) - std::max(start, static_cast<double>(c));
        Column& column = columns[static_cast<size_t>(c)];
        column.busy += part;
        if (part <= column.longest) continue;
        column.longest = part;
        column.operation = &operation;
      }
    }
  }
  return columns;
}

std::string label(const std::string& text) {
  return format("%-*s", kLabelColumns, text.c_str());
}

/// Times at every quarter of the step: "0 ms       5         10 …".
std::string scale(double step_s, int columns) {
  std::string marks(static_cast<size_t>(columns), ' '), times = marks;
  for (int quarter = 0; quarter < 4; ++quarter) {
    const auto at = static_cast<size_t>(quarter * columns / 4);
    const std::string time = format("%.3g%s", step_s * 1e3 * quarter / 4, quarter == 0 ? " ms" : "");
    marks[at] = '|';
    times.replace(at, time.size(), time);
  }
  times.erase(times.find_last_not_of(' ') + 1);
  marks.erase(marks.find_last_not_of(' ') + 1);
  return label("") + times + "\n" + label("") + marks + "\n";
}

}  // namespace

std::string draw_lanes(const Schedule& schedule, const Timeline& timeline,
                       const std::vector<std::string>& unit_names, int columns) {
  constexpr int kFewestColumns = 40;
  if (columns < kFewestColumns || timeline.operations.size() != schedule.operations.size())
    throw InternalError("draw_lanes: " + std::to_string(columns) + " columns for " +
                        std::to_string(timeline.operations.size()) + " times of " +
                        std::to_string(schedule.operations.size()) + " operations; at least 40, and equal");
  std::string text = scale(timeline.step_s, columns);
  std::map<char, const char*> legend;
  for (int s = 0; s < kStreamCount; ++s) {
    const auto stream = static_cast<StreamId>(s);
    std::string letters, units;
    for (const Column& column : columns_of(schedule, timeline, stream, columns)) {
      const Operation* const shown = column.busy > kRounding ? column.operation : nullptr;
      letters += !shown ? kIdle : column.busy >= 0.5 ? letter_of(shown->kind) : kBrief;
      units += shown && shown->unit >= 0 ? letter_of_unit(shown->unit, unit_names) : ' ';
      if (shown) legend[letters.back()] = meaning_of(letters.back());
    }
    if (letters.empty()) continue;
    units.erase(units.find_last_not_of(' ') + 1);
    text += label(name_of(stream)) + letters + "\n";
    if (!units.empty()) text += label("  unit") + units + "\n";
  }
  std::string line = label("");
  for (const auto& [letter, meaning] : legend) {
    const std::string entry = std::string(1, letter) + " " + meaning + "   ";
    if (static_cast<int>(line.size() + entry.size()) > columns + kLabelColumns) {
      text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
      line = label("");
    }
    line += entry;
  }
  text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n" + label("") + unit_legend(unit_names) + "\n";
  return text +
         format("step %.3f ms: kernels run for %.3f ms, communication is exposed for %.3f ms (%.1f%%)\n",
                timeline.step_s * 1e3, timeline.compute_s * 1e3, timeline.exposed_comm_s * 1e3,
                100 * timeline.exposed_comm_s / timeline.step_s);
}

}  // namespace minillm::shard
