// A weights file. Text that begins like a header becomes one, with its length before and zeros behind it, so
// that changes of the header get past the first check.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "checkpoint/safetensors.h"
#include "documented.h"
#include "train/weights_file.h"

using namespace minillm;

namespace {

constexpr size_t kDataBytes = 736;  // of the seeds

std::string file_of(std::string text) {
  if (!text.starts_with('{')) return text;
  std::string length;
  for (int shift = 0; shift < 64; shift += 8) length += static_cast<char>(text.size() >> shift & 255);
  return length + text + std::string(kDataBytes, '\0');
}

void read(const std::string& path) {
  const checkpoint::SafetensorsReader file(path);
  for (const checkpoint::TensorEntry& tensor : file.tensors())
    test::expect_documented([&] {
      std::vector<float> values(
          static_cast<size_t>(std::min<int64_t>(file.find(tensor.name).elements(), 64)));
      file.read(tensor, 0, values);
    });
  (void)train::trained_model(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes = file_of(test::text_of(data, size));
  const int memory = memfd_create("weights", 0);
  if (memory < 0 || ::write(memory, bytes.data(), bytes.size()) != std::ssize(bytes))
    throw std::runtime_error("no file in memory");
  test::expect_documented([&] { read("/proc/self/fd/" + std::to_string(memory)); });
  ::close(memory);
  return 0;
}
