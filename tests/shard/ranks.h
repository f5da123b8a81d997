// Test programs that run on several ranks; ranks_main.cpp has their main.
#pragma once

#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/group.h"
#include "shard/executor.h"

namespace minillm::shard {

/// This process among the ranks.
comm::Bootstrap& ranks();

/// The communicators of a run whose models are shared by `shards` ranks each; only those that it needs.
/// Collective.
class OwnedCommunicators {
 public:
  explicit OwnedCommunicators(int shards, comm::Bootstrap& all = ranks()) {
    const int rank = all.rank(), world = all.size();
    const auto make = [&](const char* name, const comm::Group& group) {
      return std::make_unique<comm::Communicator>(all,
                                                  comm::Communicator::Options{.name = name, .group = group});
    };
    if (shards > 1) gather_ = make("gather", comm::shard_group(rank, world, shards));
    if (shards > 1) reduce_ = make("reduce", comm::shard_group(rank, world, shards));
    if (shards < world) replicate_ = make("replicate", comm::replica_group(rank, world, shards));
  }
  Communicators get() const { return {gather_.get(), reduce_.get(), replicate_.get()}; }

 private:
  std::unique_ptr<comm::Communicator> gather_, reduce_, replicate_;
};

}  // namespace minillm::shard
