#include "comm/failure.h"

#include <chrono>
#include <iostream>
#include <string>
#include <thread>

namespace minillm::comm {

ExitCode exit_code(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  return known != nullptr ? known->code() : ExitCode::kInternal;
}

void end_job(Bootstrap& bootstrap, const std::exception& error) {
  std::cout.flush();
  if (bootstrap.rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  std::cerr << "[rank " + std::to_string(bootstrap.rank()) + "] error: " + error.what() + "\n" << std::flush;
  bootstrap.abort(static_cast<int>(exit_code(error)));
  std::terminate();  // not reached; g++ does not believe [[noreturn]] of a virtual function
}

}  // namespace minillm::comm
