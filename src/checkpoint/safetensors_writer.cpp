#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
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

[[noreturn]] void fail(const std::string& path, const std::string& doing) {
  throw InputError(path + ": cannot " + doing + ": " + std::strerror(errno));
}

std::string temporary(const std::string& path) {
  return path + ".tmp";
}

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

/// Makes a rename in the folder of `path` survive a power cut.
void sync_folder(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const int descriptor = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // a folder that may be written but not read: the file itself is safe
  fsync(descriptor);
  close(descriptor);
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorEntry> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)) {
  place(tensors);
  expected_ = tensors.empty() ? 0 : tensors.back().end;
  const std::string header = header_of(tensors, metadata);
  file_ = std::fopen(temporary(path_).c_str(), "wbe");
  if (file_ == nullptr) fail(path_, "create");
  if (std::fwrite(header.data(), 1, header.size(), file_) == header.size()) return;
  const int cause = errno;
  discard();
  errno = cause;
  fail(path_, "write");
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ != nullptr) discard();
}

void SafetensorsWriter::discard() {
  std::fclose(file_);
  file_ = nullptr;
  std::remove(temporary(path_).c_str());
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  if (file_ == nullptr || count > expected_ - written_)
    throw InternalError(path_ + ": more tensor bytes written than announced (" + std::to_string(expected_) +
                        ")");
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) fail(path_, "write");
  written_ += count;
}

void SafetensorsWriter::finish() {
  if (file_ == nullptr || written_ != expected_) {
    throw InternalError(path_ + ": " + std::to_string(written_) + " of " + std::to_string(expected_) +
                        " tensor bytes written");
  }
  if (std::fflush(file_) != 0 || fsync(fileno(file_)) != 0) fail(path_, "write");
  std::FILE* const file = std::exchange(file_, nullptr);
  if (std::fclose(file) != 0) fail(path_, "write");
  if (std::rename(temporary(path_).c_str(), path_.c_str()) != 0)
    fail(path_, "rename the finished file to it");
  sync_folder(path_);
}

}  // namespace minillm::checkpoint
