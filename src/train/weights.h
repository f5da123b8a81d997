// Saves the model's weights as one safetensors file that says by itself what model it is.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "core/file_lock.h"
#include "train/trainer.h"

namespace minillm::train {

/// Metadata keys of a weights file.
inline constexpr const char* kModelKey = "minillm.model";          ///< config::model_to_json
inline constexpr const char* kSequenceKey = "minillm.seq_len";     ///< train.seq_len it was trained with
inline constexpr const char* kPrecisionKey = "minillm.precision";  ///< precision.param it was trained in

/// The file that save_weights() writes in `directory`.
std::string weights_path(const std::string& directory);

/// Makes config.checkpoint.dir ready before the first step: the folder exists, no other run will save there
/// before the lock is given up, weights can be written as far as that can be known, and what killed runs left
/// is removed. Null on other ranks than 0 and where nothing is saved. Throws InputError naming the path and
/// the cause.
std::unique_ptr<FileLock> reserve_weights(const config::Config& config, const comm::Bootstrap& bootstrap);

/// Writes the fp32 master weights to weights_path(directory), unit by unit through the host memory of rank 0,
/// which takes one unit, without device memory beyond the plan. Collective. The file appears whole or not at
/// all, and not with values that are not finite: Error (kNumerics). Calls `progress` on all ranks after each
/// unit.
void save_weights(Trainer& trainer, const config::Config& config, comm::Bootstrap& bootstrap,
                  const std::string& directory, const std::function<void()>& progress);

}  // namespace minillm::train
