#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_format.h"
#include "core/checked.h"
#include "core/error.h"

namespace minillm::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

/// Fills begin and end. Throws InternalError for names that the format forbids and impossible sizes.
void place(std::vector<TensorEntry>& tensors) {
  std::set<std::string> names{std::string(kMetadataKey)};
  int64_t position = 0;
  for (TensorEntry& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw InternalError("safetensors: the tensor name '" + tensor.name + "' is taken");
    const auto bytes = bytes_of(tensor.shape, tensor.dtype);
    tensor.begin = position;
    if (!bytes || __builtin_add_overflow(position, *bytes, &position))
      throw InternalError("safetensors: the size of '" + tensor.name + "' does not fit 64 bits");
    tensor.end = position;
  }
}

/// The length and the padded JSON that precede the data.
std::string header_of(const std::vector<TensorEntry>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  for (const TensorEntry& tensor : tensors) {
    header[tensor.name] = {{"dtype", format_name(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string json = header.dump();
  json.resize(round_up(static_cast<int64_t>(json.size()), kHeaderAlignment), ' ');
  if (static_cast<int64_t>(json.size()) > kLongestHeader)
    throw InternalError("safetensors: the header is too long");
  const uint64_t length = json.size();
  std::string header_bytes(kLengthBytes, '\0');
  std::memcpy(header_bytes.data(), &length, sizeof length);
  return header_bytes + json;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::vector<TensorEntry> tensors,
                                 const std::map<std::string, std::string>& metadata) {
  place(tensors);
  data_bytes_ = tensors.empty() ? 0 : tensors.back().end;
  header_ = header_of(tensors, metadata);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const SafetensorsFile& file)
    : path_(path), file_(path, file.bytes()), expected_(file.data_bytes()) {
  file_.write(file.header());
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  if (count > expected_ - written_)
    throw InternalError(path_ + ": more tensor bytes written than announced (" + std::to_string(expected_) +
                        ")");
  file_.write(bytes);
  written_ += count;
}

void SafetensorsWriter::finish() {
  if (written_ != expected_) {
    throw InternalError(path_ + ": " + std::to_string(written_) + " of " + std::to_string(expected_) +
                        " tensor bytes written");
  }
  file_.finish();
}

}  // namespace minillm::checkpoint
