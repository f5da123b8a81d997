#include "cuda/gemm_cache.h"

#include <cublasLt.h>
#include <unistd.h>

#include <cerrno>

#include "core/error.h"
#include "core/output_file.h"
#include "core/text_file.h"
#include "cuda/check.h"

namespace minillm::cuda {

GemmDevice gemm_device() {
  int device = 0, driver = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device));
  check(cudaGetDeviceProperties(&properties, device));
  check(cudaDriverGetVersion(&driver));
  return {properties.name, properties.multiProcessorCount, driver,
          static_cast<int64_t>(cublasLtGetVersion())};
}

std::string describe(const GemmDevice& device) {
  return device.name + " (" + std::to_string(device.multiprocessors) + " multiprocessors, driver " +
         std::to_string(device.driver) + ", cuBLASLt " + std::to_string(device.blas) + ")";
}

GemmCache read_gemm_cache(const std::string& path, const Report& report) {
  if (::access(path.c_str(), F_OK) != 0 && errno == ENOENT) return {};
  const std::string text = read_text_file(path, "gemm.cache");
  try {
    return parse_gemm_cache(text, path);
  } catch (const InputError& error) {
    report(std::string("gemm.cache ") + error.what() + "; all shapes are timed again");
    return {};
  }
}

void write_gemm_cache(const std::string& path, const GemmCache& cache) try {
  OutputFile file(path);
  file.write(to_json(cache));
  file.finish();
} catch (const InputError& error) {
  throw InputError(std::string("gemm.cache ") + error.what());
}

bool choose_gemms(BlasLt& blas, GemmCache& cache, std::span<std::byte> scratch, cudaStream_t stream,
                  const Report& report) {
  GemmChoices& choices = cache[gemm_device()];
  bool timed = false;
  for (const GemmKey& key : blas.shapes()) {
    if (const auto found = choices.find(key); found != choices.end()) {
      const std::optional<std::string> refusal = blas.adopt(key, found->second);
      report(refusal
                 ? describe(key) + ": the algorithm of gemm.cache is refused, " + *refusal + "; timed again"
                 : describe(key, found->second) + " (from gemm.cache)");
      if (!refusal) continue;
    }
    const GemmChoice choice = blas.tune(key, scratch, stream);
    report(describe(key, choice));
    choices[key] = choice;
    timed = true;
  }
  return timed;
}

void adopt_gemms(BlasLt& blas, const GemmCache& cache) {
  const GemmDevice here = gemm_device();
  const auto found = cache.find(here);
  if (found == cache.end())
    throw UsageError("gemm.deterministic is false, but algorithms were chosen on " +
                     (cache.empty() ? "no device" : describe(cache.begin()->first)) +
                     ", and this rank's is " + describe(here) +
                     ": set gemm.deterministic=true, or use equal devices and libraries");
  for (const GemmKey& key : blas.shapes()) {
    const auto choice = found->second.find(key);
    if (choice == found->second.end())
      throw DeviceError(describe(key) + ": rank 0 has no such product, so there is no choice to follow");
    if (const std::optional<std::string> refusal = blas.adopt(key, choice->second))
      throw DeviceError(describe(key) + ": the algorithm that rank 0 chose is refused, " + *refusal);
  }
}

}  // namespace minillm::cuda
