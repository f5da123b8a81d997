#include "cuda/check.h"

#include <string>

#include "core/error.h"

namespace minillm::cuda {

void check(cudaError_t code, std::source_location where) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here, so that it is not met again by a later, innocent call
  throw DeviceError(std::string(where.file_name()) + ":" + std::to_string(where.line()) + " (" +
                    where.function_name() + "): " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

}  // namespace minillm::cuda
