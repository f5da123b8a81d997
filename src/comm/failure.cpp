#include "comm/failure.h"

#include <chrono>
#include <iostream>
#include <new>
#include <string>
#include <thread>

namespace minillm::comm {
namespace {

bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

}  // namespace

ExitCode exit_code(const std::exception& error) {
  if (const auto* known = dynamic_cast<const Error*>(&error)) return known->code();
  return is_out_of_memory(error) ? ExitCode::kMemory : ExitCode::kInternal;
}

std::string describe(const std::exception& error) {
  if (is_out_of_memory(error))
    return "the host has too little memory (std::bad_alloc). Use smaller files, or a machine or a limit with "
           "more";
  return error.what();
}

void end_job(Bootstrap& bootstrap, const std::exception& error) {
  std::cout.flush();
  if (bootstrap.rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  std::cerr << "[rank " + std::to_string(bootstrap.rank()) + "] error: " + describe(error) + "\n"
            << std::flush;
  bootstrap.abort(static_cast<int>(exit_code(error)));
  std::terminate();  // not reached; g++ does not believe [[noreturn]] of a virtual function
}

}  // namespace minillm::comm
