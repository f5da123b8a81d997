// Values of environment variables: those of the simulated device.
#include "core/number.h"
#include "documented.h"
#include "sim/control.h"

using namespace minillm;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text = test::text_of(data, size);
  (void)parse_number<double>(text);
  if (const auto number = parse_number<int64_t>(text)) {
    test::expect_documented([&] { sim::set_memory(*number); });
    test::expect_documented([&] { sim::set_workers(static_cast<int>(*number)); });
  }
  for (const auto set : {&sim::set_order, &sim::set_streams, &sim::set_nccl_memory})
    test::expect_documented([&] { set(text); });
  return 0;
}
