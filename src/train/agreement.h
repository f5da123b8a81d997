// What all ranks of a run have to have the same of. docs/running.md has the table for users.
#pragma once

#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"

namespace minillm::train {

/// Compares, over all ranks: every key of the configuration (of a key that may differ by rank, whether it is
/// set), `program` (name and version), NCCL's version, the number of parameters, names and sizes of the data
/// files in their order, size and a sampled checksum of the file with initial weights, and for groups "of a
/// node" the ranks per node. Collective, before anything else that is. Throws CommunicationError with one
/// message on all ranks that names keys, values and ranks.
void require_agreement(const config::Config& config, const std::string& program, comm::Bootstrap& bootstrap);

/// The same for what parallel.policy "auto" chose from times on `hardware`, which each rank found by itself.
void require_same_choice(const config::Config& chosen, const std::string& hardware,
                         comm::Bootstrap& bootstrap);

/// Size and checksum of a file, or why there is none. The checksum is of the whole file up to a megabyte,
/// else of a megabyte in pieces from all over it: two trained models differ everywhere.
std::string identity_of_file(const std::string& path);

}  // namespace minillm::train
