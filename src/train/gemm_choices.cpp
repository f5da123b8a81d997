#include "train/gemm_choices.h"

#include <iostream>
#include <string>

#include "cuda/gemm_cache.h"

namespace minillm::train {
namespace {

/// Rank 0 tells the others, who wait for its choices, whether it goes on choosing.
bool goes_on(bool choosing, comm::Bootstrap& bootstrap) {
  bootstrap.broadcast(std::as_writable_bytes(std::span(&choosing, 1)));
  return choosing;
}

}  // namespace

void choose_gemms(cuda::BlasLt& blas, const config::Gemm& config, comm::Bootstrap& bootstrap,
                  std::span<std::byte> scratch, cudaStream_t stream, const std::function<void()>& progress) {
  std::string chosen;
  if (bootstrap.rank() == 0) {
    const auto print = [&](const std::string& line) {
      std::cout << line << std::endl;
      goes_on(true, bootstrap);
      progress();
    };
    cuda::GemmCache cache;
    if (!config.cache.empty()) cache = cuda::read_gemm_cache(config.cache, print);
    const bool timed = cuda::choose_gemms(blas, cache, scratch, stream, print);
    if (timed && !config.cache.empty()) cuda::write_gemm_cache(config.cache, cache);
    const cuda::GemmDevice device = cuda::gemm_device();
    chosen = cuda::to_json({{device, cache[device]}});
    goes_on(false, bootstrap);
  } else {
    while (goes_on(false, bootstrap)) progress();
  }
  chosen = comm::broadcast(bootstrap, std::move(chosen));
  if (bootstrap.rank() != 0) cuda::adopt_gemms(blas, cuda::parse_gemm_cache(chosen, "the choices of rank 0"));
}

}  // namespace minillm::train
