#include "documented.h"
#include "shard/hardware.h"

using namespace minillm;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return test::expect_documented([&] {
    const shard::Hardware hardware = shard::parse_hardware(test::text_of(data, size), "hardware");
    (void)shard::parse_hardware(shard::to_json(hardware), "again");
  });
}
