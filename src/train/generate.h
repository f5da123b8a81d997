// Text from trained weights: the model as a byte-level language model, on one device.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace minillm::train {

struct GenerateOptions {
  std::string model;         ///< a .safetensors file written by training
  std::string prompt;        ///< bytes to continue; empty: a line break
  int64_t tokens = 200;      ///< how many to add
  double temperature = 0.8;  ///< 0: always the most likely byte
  int64_t seed = 0;
};

/// Writes the prompt and the continuation to `out` as it grows. The window is the seq_len that the model was
/// trained with. Throws InputError when the file is no weights file of this program or does not hold the
/// model that it names, UsageError when the model is not a causal byte model (causal false, or vocab_size
/// above 256), the prompt has bytes of vocab_size or more, or an option is out of range, MemoryError when the
/// device has too little.
void generate(const GenerateOptions& options, std::ostream& out);

}  // namespace minillm::train
