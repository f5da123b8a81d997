// What is demanded of a weights file before anything is made of it, wherever it comes from.
#pragma once

#include <cstdint>

#include "checkpoint/safetensors.h"
#include "config/config.h"
#include "core/dtype.h"

namespace minillm::train {

/// Throws InputError, naming file and tensor, unless the file has each tensor of the model in a type that can
/// be read and in its shape; for another shape with both. Tensors beyond those do not matter.
void require_tensors(const checkpoint::SafetensorsReader& file, const config::Model& model);

/// What a file that training wrote says about itself.
struct TrainedModel {
  config::Model model;
  int64_t sequence = 0;  ///< train.seq_len
  DType precision = DType::kBf16;
};
/// Throws InputError naming file, key, value and what is allowed for metadata that is missing or not what
/// training writes, and as require_tensors().
TrainedModel trained_model(const checkpoint::SafetensorsReader& file);

}  // namespace minillm::train
