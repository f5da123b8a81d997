// The safetensors format (https://huggingface.co/docs/safetensors): an 8-byte little-endian header length, a
// JSON header {name: {dtype, shape, data_offsets}, "__metadata__": {string: string}}, then the tensors' bytes
// without holes. The header is padded with spaces to a multiple of 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace minillm::checkpoint {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kFp32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  ///< bytes, relative to the start of the data

  int64_t elements() const;
};

/// Writes a file tensor by tensor. The file appears under its name only in finish(); until then there is
/// `path`.tmp, which the destructor removes. The folder of `path` has to exist.
class SafetensorsWriter {
 public:
  /// All tensors must be known in advance, in the order in which they will be written (begin and end are
  /// computed here). Throws InputError naming the path when it cannot be created.
  SafetensorsWriter(std::string path, std::vector<TensorEntry> tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Appends bytes of the next tensor; a tensor may come in several pieces. Throws InputError when the disk
  /// is full.
  void write(std::span<const std::byte> bytes);
  /// Flushes to disk and renames. Throws InternalError when bytes are missing.
  void finish();

 private:
  void discard();  ///< closes and removes the unfinished file

  std::string path_;
  std::FILE* file_ = nullptr;
  int64_t expected_ = 0;
  int64_t written_ = 0;
};

/// Reads a file's header at once and tensors on demand. F32 and BF16 tensors only.
class SafetensorsReader {
 public:
  /// Throws InputError naming path and what is wrong: absent, truncated, malformed header, overlapping or
  /// missing ranges, a dtype that is not supported.
  explicit SafetensorsReader(std::string path);

  const std::vector<TensorEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  /// Throws InputError listing similar names when there is none.
  const TensorEntry& find(const std::string& name) const;

  /// Elements [first, first + out.size()) of a tensor, converted to fp32.
  void read(const TensorEntry& tensor, int64_t first, std::span<float> out) const;

 private:
  std::string path_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
  int64_t data_start_ = 0;
};

}  // namespace minillm::checkpoint
