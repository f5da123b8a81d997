// The bootstrap over MPI; in builds with MINILLM_MPI only.
#pragma once

#include <memory>

#include "comm/bootstrap.h"

namespace minillm::comm {

/// Starts MPI with MPI_THREAD_MULTIPLE (the simulated device's collectives run on the streams' threads). MPI
/// ends with the object, which waits for the other ranks: after an error call abort() instead. Throws
/// CommunicationError.
std::unique_ptr<Bootstrap> make_mpi_bootstrap(int* argc, char*** argv);

}  // namespace minillm::comm
