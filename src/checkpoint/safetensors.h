// The safetensors format (https://huggingface.co/docs/safetensors): an 8-byte little-endian header length, a
// JSON header {name: {dtype, shape, data_offsets}, "__metadata__": {string: string}}, then the tensors' bytes
// without holes. The header is padded with spaces to a multiple of 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/output_file.h"

namespace minillm::checkpoint {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kFp32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  ///< bytes, relative to the start of the data
  /// What a file calls a type that is neither F32 nor BF16; empty otherwise. Such a tensor is not read.
  std::string other_type = {};

  int64_t elements() const;
};

/// What a file will have, known before any of its values.
class SafetensorsFile {
 public:
  /// The tensors in the order in which they will be written; begin and end are computed here. Throws
  /// InternalError for names that the format forbids and impossible sizes.
  SafetensorsFile(std::vector<TensorEntry> tensors, const std::map<std::string, std::string>& metadata);

  const std::string& header() const { return header_; }  ///< all that precedes the data
  int64_t data_bytes() const { return data_bytes_; }
  int64_t bytes() const { return std::ssize(header_) + data_bytes_; }

 private:
  std::string header_;
  int64_t data_bytes_ = 0;
};

/// Writes a file tensor by tensor, as an OutputFile: it appears under its name only in finish(). The folder
/// of `path` has to exist. Throws InputError naming the path where it cannot be written.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const SafetensorsFile& file);
  SafetensorsWriter(const std::string& path, std::vector<TensorEntry> tensors,
                    const std::map<std::string, std::string>& metadata)
      : SafetensorsWriter(path, SafetensorsFile(std::move(tensors), metadata)) {}

  /// Appends bytes of the next tensor; a tensor may come in several pieces.
  void write(std::span<const std::byte> bytes);
  /// Throws InternalError when bytes are missing.
  void finish();

 private:
  std::string path_;
  OutputFile file_;
  int64_t expected_;
  int64_t written_ = 0;
};

/// Reads a file's header at once and tensors on demand. Tensors that nobody asks for may have any type.
class SafetensorsReader {
 public:
  /// Throws InputError naming path and what is wrong: absent, no regular file, truncated, malformed header,
  /// overlapping or missing ranges, sizes that are not those of shape and type, where the type is one of the
  /// format's.
  explicit SafetensorsReader(std::string path);

  const std::vector<TensorEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  /// Throws InputError listing similar names when there is none, and for types other than F32 and BF16.
  const TensorEntry& find(const std::string& name) const;

  /// Elements [first, first + out.size()) of a tensor, converted to fp32.
  void read(const TensorEntry& tensor, int64_t first, std::span<float> out) const;

 private:
  std::string path_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, size_t> index_;  // in tensors_, by name
  std::map<std::string, std::string> metadata_;
  int64_t data_start_ = 0;
};

}  // namespace minillm::checkpoint
