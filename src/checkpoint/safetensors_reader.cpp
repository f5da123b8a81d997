#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "config/strict_json.h"
#include "core/edit_distance.h"
#include "core/error.h"
#include "core/text_file.h"

namespace minillm::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void malformed(const std::string& path, const std::string& what) {
  throw InputError(path + ": not a valid safetensors file: " + what);
}

std::ifstream open_for_reading(const std::string& path) {
  require_regular_file(path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  // Reading a byte finds out about folders, which open like files.
  if (!file || file.peek() == std::ifstream::traits_type::eof()) {
    const bool empty = file.is_open() && errno == 0;
    throw InputError(path + ": cannot read: " + (empty ? "the file is empty" : std::strerror(errno)));
  }
  return file;
}

/// Sizes and offsets in the header: JSON integers from 0 to 2^63 - 1.
std::optional<int64_t> size_from(const Json& value) {
  if (!value.is_number_unsigned() || !std::in_range<int64_t>(value.get<uint64_t>())) return std::nullopt;
  return value.get<int64_t>();
}

std::optional<std::vector<int64_t>> sizes_from(const Json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> sizes;
  for (const Json& element : value) {
    const auto size = size_from(element);
    if (!size) return std::nullopt;
    sizes.push_back(*size);
  }
  return sizes;
}

/// Sets the type and the shape; the bytes that they take, where the type is one of the format's.
std::optional<int64_t> set_type_and_shape(TensorEntry& tensor, const Json& value, const std::string& path,
                                          const std::string& where) {
  if (!value["dtype"].is_string())
    malformed(path, where + "'dtype' is " + config::describe_value(value["dtype"]) + "; wanted a string");
  const auto type = value["dtype"].get<std::string>();
  tensor.other_type = type;
  for (const DType dtype : {DType::kFp32, DType::kBf16})
    if (type == format_name(dtype)) tensor.dtype = dtype, tensor.other_type.clear();

  const auto shape = sizes_from(value["shape"]);
  const auto element_bits = bits_of(type);
  const auto bits = shape ? product_of(*shape, element_bits.value_or(1)) : std::nullopt;
  if (!bits) malformed(path, where + "'shape' is not a list of sizes whose product fits 64 bits");
  tensor.shape = *shape;
  if (!element_bits) return std::nullopt;
  if (*bits % 8 != 0) malformed(path, where + "its shape takes no whole number of bytes");
  return *bits / 8;
}

TensorEntry tensor_from(const std::string& name, const Json& value, const std::string& path) {
  const std::string where = "tensor '" + name + "': ";
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!value.is_object() || !value.contains(key)) malformed(path, where + "'" + key + "' is missing");

  TensorEntry tensor;
  tensor.name = name;
  const std::optional<int64_t> bytes = set_type_and_shape(tensor, value, path, where);
  const auto offsets = sizes_from(value["data_offsets"]);
  if (!offsets || offsets->size() != 2 || offsets->front() > offsets->back())
    malformed(path, where + "'data_offsets' is not [begin, end] with 0 <= begin <= end");
  tensor.begin = offsets->front();
  tensor.end = offsets->back();
  if (bytes && tensor.end - tensor.begin != *bytes) {
    malformed(path, where + "its shape takes " + std::to_string(*bytes) + " bytes, its offsets hold " +
                        std::to_string(tensor.end - tensor.begin));
  }
  return tensor;
}

std::map<std::string, std::string> metadata_from(const Json& value, const std::string& path) {
  if (!value.is_object()) malformed(path, "'__metadata__' is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) malformed(path, "'__metadata__." + key + "' is not a string");
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

/// Sorts by position and demands that the tensors fill the data without holes or overlaps.
void check_ranges(std::vector<TensorEntry>& tensors, int64_t data_bytes, const std::string& path) {
  std::ranges::stable_sort(tensors, {}, [](const TensorEntry& t) { return std::pair(t.begin, t.end); });
  int64_t position = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.begin != position) {
      malformed(path, "tensor '" + tensor.name + "' begins at byte " + std::to_string(tensor.begin) +
                          " of the data where byte " + std::to_string(position) + " was expected");
    }
    position = tensor.end;
  }
  if (position != data_bytes) {
    malformed(path, "its tensors take " + std::to_string(position) + " bytes, the file holds " +
                        std::to_string(data_bytes) + (data_bytes < position ? "; it is truncated" : ""));
  }
}

}  // namespace

int64_t TensorEntry::elements() const {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  return count;
}

SafetensorsReader::SafetensorsReader(std::string path) : path_(std::move(path)) {
  std::ifstream file = open_for_reading(path_);
  const int64_t file_bytes = file.seekg(0, std::ios::end).tellg();
  file.seekg(0);
  uint64_t length = 0;
  if (file_bytes < kLengthBytes || !file.read(reinterpret_cast<char*>(&length), kLengthBytes))
    malformed(path_, "shorter than 8 bytes");
  if (length > static_cast<uint64_t>(std::min(file_bytes - kLengthBytes, kLongestHeader))) {
    malformed(path_, "a header of " + std::to_string(length) + " bytes in a file of " +
                         std::to_string(file_bytes) + " bytes (at most " + std::to_string(kLongestHeader) +
                         " are allowed)");
  }
  std::string text(length, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(length)))
    malformed(path_, "the header cannot be read");
  if (!text.starts_with('{')) malformed(path_, "the header does not begin with '{'");

  const Json header = config::parse_strict_json(text, path_ + ": header");
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataKey) {
      metadata_ = metadata_from(value, path_);
    } else {
      tensors_.push_back(tensor_from(name, value, path_));
    }
  }
  data_start_ = kLengthBytes + static_cast<int64_t>(length);
  check_ranges(tensors_, file_bytes - data_start_, path_);
  for (size_t i = 0; i < tensors_.size(); ++i) index_[tensors_[i].name] = i;
}

const TensorEntry& SafetensorsReader::find(const std::string& name) const {
  if (const auto found = index_.find(name); found != index_.end()) {
    const TensorEntry& tensor = tensors_[found->second];
    if (tensor.other_type.empty()) return tensor;
    throw InputError(path_ + ": tensor '" + name + "' has the dtype \"" + tensor.other_type +
                     "\"; supported are \"F32\" and \"BF16\"");
  }

  std::vector<std::string> names;
  for (const TensorEntry& tensor : tensors_) names.push_back(tensor.name);
  constexpr int64_t kSimilar = 3;
  const auto last = names.begin() + std::min(kSimilar, std::ssize(names));
  auto distance = [&](const std::string& other) { return edit_distance(name, other); };
  std::ranges::partial_sort(names, last, {}, distance);
  std::string similar;
  for (auto it = names.begin(); it != last; ++it) similar += (similar.empty() ? "" : ", ") + *it;
  throw InputError(path_ + ": no tensor '" + name + "'; " +
                   (similar.empty() ? "the file holds none" : "similar names in it: " + similar));
}

void SafetensorsReader::read(const TensorEntry& tensor, int64_t first, std::span<float> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (first < 0 || first > tensor.elements() || count > tensor.elements() - first)
    throw InternalError(path_ + ": elements outside of tensor '" + tensor.name + "' were asked for");
  if (count == 0) return;
  const int64_t element = size_of(tensor.dtype);
  std::vector<uint16_t> halves(tensor.dtype == DType::kBf16 ? count : 0);
  char* const destination =
      halves.empty() ? reinterpret_cast<char*>(out.data()) : reinterpret_cast<char*>(halves.data());

  std::ifstream file = open_for_reading(path_);
  file.seekg(data_start_ + tensor.begin + first * element);
  if (!file.read(destination, count * element))
    throw InputError(path_ + ": tensor '" + tensor.name + "' cannot be read; did the file change?");
  std::ranges::transform(halves, out.begin(),
                         [](uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); });
}

}  // namespace minillm::checkpoint
