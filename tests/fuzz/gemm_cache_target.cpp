#include "cuda/gemm_cache.h"
#include "documented.h"

using namespace minillm;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return test::expect_documented([&] {
    const cuda::GemmCache cache = cuda::parse_gemm_cache(test::text_of(data, size), "cache");
    if (cuda::parse_gemm_cache(cuda::to_json(cache), "again") != cache)
      throw InternalError("what was printed is read as something else");
  });
}
