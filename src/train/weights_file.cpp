#include "train/weights_file.h"

#include <string>
#include <vector>

#include "config/schema.h"
#include "core/error.h"
#include "core/number.h"
#include "model/parameters.h"
#include "train/weights.h"

namespace minillm::train {
namespace {

const std::string& metadata(const checkpoint::SafetensorsReader& file, const std::string& key) {
  const auto entry = file.metadata().find(key);
  if (entry == file.metadata().end())
    throw InputError(
        file.path() + ": has no metadata \"" + key +
        "\", so it was not written by minillm train. Give the model.safetensors of checkpoint.dir.");
  return entry->second;
}

[[noreturn]] void refuse(const checkpoint::SafetensorsReader& file, const std::string& key,
                         const std::string& wanted) {
  throw InputError(file.path() + ": the metadata \"" + key + "\" is \"" + metadata(file, key) +
                   "\"; wanted " + wanted);
}

int64_t sequence_of(const checkpoint::SafetensorsReader& file) {
  const auto length = parse_number<int64_t>(metadata(file, kSequenceKey));
  if (!length || !config::kSequenceLengths.allows(*length))
    refuse(file, kSequenceKey, config::kSequenceLengths.wanted());
  return *length;
}

DType precision_of(const checkpoint::SafetensorsReader& file) {
  for (const DType type : {DType::kBf16, DType::kFp32})
    if (metadata(file, kPrecisionKey) == name_of(type)) return type;
  refuse(file, kPrecisionKey, config::Type{}.wanted());
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace

void require_tensors(const checkpoint::SafetensorsReader& file, const config::Model& model) {
  model::for_each_parameter(model, [&](const model::Parameter& parameter) {
    const checkpoint::TensorEntry& tensor = file.find(parameter.name);
    if (tensor.shape != parameter.shape)
      throw InputError(file.path() + ": tensor '" + parameter.name + "' has the shape " +
                       text_of(tensor.shape) + "; the model's is " + text_of(parameter.shape));
  });
}

TrainedModel trained_model(const checkpoint::SafetensorsReader& file) {
  TrainedModel trained{config::model_from_json(metadata(file, kModelKey),
                                               file.path() + ": the metadata \"" + kModelKey + "\""),
                       sequence_of(file), precision_of(file)};
  require_tensors(file, trained.model);
  return trained;
}

}  // namespace minillm::train
