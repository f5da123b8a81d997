// Saves the model's weights as one safetensors file that says by itself what model it is.
#pragma once

#include <functional>
#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "train/trainer.h"

namespace minillm::train {

/// Metadata keys of a weights file.
inline constexpr const char* kModelKey = "minillm.model";          ///< config::model_to_json
inline constexpr const char* kSequenceKey = "minillm.seq_len";     ///< train.seq_len it was trained with
inline constexpr const char* kPrecisionKey = "minillm.precision";  ///< precision.param it was trained in

/// The file that save_weights() writes in `directory`.
std::string weights_path(const std::string& directory);

/// Creates `directory` and checks that a file can be written there. Throws InputError naming it and the
/// cause.
void prepare_directory(const std::string& directory);

/// Writes the fp32 master weights to weights_path(directory), unit by unit through the host memory of rank 0,
/// without device memory beyond the plan. Collective. The file appears whole or not at all. Calls `progress`
/// on all ranks after each unit.
void save_weights(Trainer& trainer, const config::Config& config, comm::Bootstrap& bootstrap,
                  const std::string& directory, const std::function<void()>& progress);

}  // namespace minillm::train
