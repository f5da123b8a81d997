#include "cuda/check.h"

#include <string>

#include "core/error.h"

namespace minillm::cuda {

void check(cudaError_t code, std::source_location where) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here, so that it is not met again by a later, innocent call
  const std::string text = std::string(where.file_name()) + ":" + std::to_string(where.line()) + " (" +
                           where.function_name() + "): " + cudaGetErrorName(code) + ": " +
                           cudaGetErrorString(code);
  // Kernels that are loaded when they are first launched, graphs and events need memory as well.
  if (code == cudaErrorMemoryAllocation)
    throw MemoryError(text + ": too little is left beside what was planned; raise memory.reserve");
  throw DeviceError(text);
}

}  // namespace minillm::cuda
