// The device's failure and each host thread's last error.
#pragma once

#include <string>

#include "sim/driver_types.h"

namespace sim {

/// Makes `code` sticky with its text; the first failure stays.
void set_failure(cudaError_t code, const std::string& text);
/// The sticky error, or cudaSuccess.
cudaError_t failure();
/// The text of the sticky error; valid for the rest of the process.
const char* failure_text();

/// Notes `code` as the calling thread's last error and returns it; cudaSuccess leaves the last error as it
/// is.
cudaError_t report(cudaError_t code);
/// report() of the code that a call returns: `code`, unless a failure overrides it.
cudaError_t finish(cudaError_t code = cudaSuccess);

}  // namespace sim
