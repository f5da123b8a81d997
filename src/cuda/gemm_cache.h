// Choices of algorithms that outlive the process: as JSON in a file, and as bytes for the other ranks.
//
// A choice is valid for one kind of GPU, driver and version of cuBLASLt; a file holds those of any number of
// them, and what it says about others than the current one is kept and not used. Nothing in a file is
// trusted: text that is not as written is reported and replaced, and cuBLASLt checks each algorithm before it
// is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "cuda/gemm.h"
#include "cuda/gemm_choice.h"

namespace minillm::cuda {

/// What a choice is valid for besides its shape.
struct GemmDevice {
  std::string name;
  int multiprocessors = 0;
  int driver = 0;    ///< cudaDriverGetVersion()
  int64_t blas = 0;  ///< cublasLtGetVersion()
  auto operator<=>(const GemmDevice&) const = default;
};
/// Of the current device.
GemmDevice gemm_device();
/// "NVIDIA H100 (132 multiprocessors, driver 13000, cuBLASLt 130100)".
std::string describe(const GemmDevice& device);

using GemmChoices = std::map<GemmKey, GemmChoice>;
using GemmCache = std::map<GemmDevice, GemmChoices>;

/// Equal caches give equal text.
std::string to_json(const GemmCache& cache);
/// The inverse. Throws InputError, naming `name`, for anything that to_json() does not write.
GemmCache parse_gemm_cache(const std::string& text, const std::string& name);

/// Takes one line for people.
using Report = std::function<void(const std::string&)>;

/// The cache in a file: empty when there is no file, or, reported, when it cannot be understood. Throws
/// InputError when the file cannot be read.
GemmCache read_gemm_cache(const std::string& path, const Report& report);
/// Replaces the file at once: a reader sees the old or the new one, whole. Throws InputError when it cannot
/// be written.
void write_gemm_cache(const std::string& path, const GemmCache& cache);

/// Gives each of blas.shapes() a choice: that of `cache` for the current device unless cuBLASLt refuses it,
/// else by BlasLt::tune(), which is added to `cache`. Reports a line per shape. Whether anything was timed.
bool choose_gemms(BlasLt& blas, GemmCache& cache, std::span<std::byte> scratch, cudaStream_t stream,
                  const Report& report);
/// Gives each of blas.shapes() the choice in `cache`, as another rank made it. Throws UsageError when that
/// rank's device is another one than the current, DeviceError when a choice is missing or refused.
void adopt_gemms(BlasLt& blas, const GemmCache& cache);

}  // namespace minillm::cuda
