// Test programs that run on several ranks; ranks_main.cpp has their main.
#pragma once

#include <memory>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "shard/executor.h"

namespace minillm::shard {

/// This process among the ranks.
comm::Bootstrap& ranks();

/// Communicators of all ranks, or none when there is only one. Collective.
struct OwnedCommunicators {
  OwnedCommunicators() {
    if (ranks().size() == 1) return;
    gather = std::make_unique<comm::Communicator>(ranks(), "gather");
    reduce = std::make_unique<comm::Communicator>(ranks(), "reduce");
  }
  Communicators get() const { return {gather.get(), reduce.get()}; }

  std::unique_ptr<comm::Communicator> gather, reduce;
};

}  // namespace minillm::shard
