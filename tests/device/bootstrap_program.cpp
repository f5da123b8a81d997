// Starts the job's bootstrap; prints the error that this gives, or "rank R of N".
#include <cstdio>

#include "comm/bootstrap.h"
#include "core/error.h"

int main(int argc, char** argv) {
  try {
    const auto job = minillm::comm::make_bootstrap(&argc, &argv);
    std::printf("rank %d of %d\n", job->rank(), job->size());
    return 0;
  } catch (const minillm::Error& error) {
    std::printf("%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
