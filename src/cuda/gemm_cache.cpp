#include "cuda/gemm_cache.h"

#include <cublasLt.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "core/error.h"
#include "cuda/check.h"

namespace minillm::cuda {
namespace {

[[noreturn]] void fail(const std::string& path, const char* doing) {
  throw InputError("gemm.cache " + path + ": cannot " + doing + ": " + std::strerror(errno));
}

/// Next to `path` and nobody else's, whatever machine they run on.
std::string temporary(const std::string& path) {
  std::random_device random;
  return path + ".tmp-" + std::to_string(random()) + std::to_string(random());
}

bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

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
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file && errno == ENOENT) return {};
  if (!file) fail(path, "read");
  std::ostringstream text;
  text << file.rdbuf();
  try {
    return parse_gemm_cache(text.str(), path);
  } catch (const InputError& error) {
    report(std::string("gemm.cache ") + error.what() + "; all shapes are timed again");
    return {};
  }
}

void write_gemm_cache(const std::string& path, const GemmCache& cache) {
  const std::string part = temporary(path);
  const int file = ::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) fail(path, "create");
  const bool written = write_all(file, to_json(cache)) && ::fsync(file) == 0;
  const int cause = errno;
  const bool closed = ::close(file) == 0;
  if (written && closed && std::rename(part.c_str(), path.c_str()) == 0) return;
  if (!written) errno = cause;
  const int reason = errno;
  ::unlink(part.c_str());
  errno = reason;
  fail(path, "write");
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
