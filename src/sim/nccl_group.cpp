#include "sim/nccl_group.h"

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "sim/nccl_communicator.h"

namespace nccl_over_mpi {
namespace {

struct Range {
  const std::byte* begin;
  int64_t bytes;
};

bool overlap(const Range& a, const Range& b) {
  return a.bytes > 0 && b.bytes > 0 && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

struct Accesses {
  explicit Accesses(const Issue& issue) {
    const Extent extent = extent_of(issue.call, issue.communicator->size(), issue.communicator->rank());
    const int64_t element = size_of(static_cast<ncclDataType_t>(issue.call.type));
    read = {static_cast<const std::byte*>(issue.send), extent.sent * element};
    written = {static_cast<const std::byte*>(issue.receive), extent.received * element};
  }
  Range read, written;
};

bool conflict(const Accesses& a, const Accesses& b) {
  return overlap(a.written, b.written) || overlap(a.written, b.read) || overlap(a.read, b.written);
}

void require_independent(std::span<const Issue> issues) {
  for (size_t i = 0; i < issues.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (conflict(Accesses(issues[i]), Accesses(issues[j])))
        throw Failure(ncclInvalidUsage, "ncclGroupEnd: " + describe(issues[i].call) + " and " +
                                            describe(issues[j].call) +
                                            " of one group run at the same time, but one writes what the "
                                            "other reads or writes");
}

}  // namespace

void Group::fail(const Failure& failure) {
  if (!failure_) failure_ = failure;
}

std::vector<Issue> Group::end() {
  if (depth_ == 0) throw Failure(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--depth_ > 0) return {};
  std::vector<Issue> issues = std::exchange(issues_, {});
  if (const std::optional<Failure> failure = std::exchange(failure_, std::nullopt)) throw *failure;
  require_independent(issues);
  return issues;
}

}  // namespace nccl_over_mpi
