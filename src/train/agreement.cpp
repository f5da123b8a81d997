#include "train/agreement.h"

#include <nccl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "comm/agreement.h"
#include "data/corpus.h"
#include "model/parameters.h"

namespace minillm::train {
namespace {

using Statements = std::vector<comm::Statement>;

/// Of a key: its value, or of a path what it leads to, or whether it is set.
std::string value_of(const config::KeyValue& key, const config::Config& config) {
  if (!key.by_rank || key.value == "\"pytorch\"") return key.value;
  if (key.key == "model.init") return identity_of_file(config.model.init);
  return key.value == "\"\"" ? "not set" : "set";
}

Statements statements_of(const config::Config& config, const comm::Bootstrap& bootstrap) {
  Statements statements;
  for (const config::KeyValue& key : config::key_values(config))
    statements.push_back({key.key, value_of(key, config)});
  if (config.parallel.policy == "hybrid" && config.parallel.group_size == 0)
    statements.push_back(
        {"parallel.group_size 0, the ranks of a node,", std::to_string(bootstrap.local_size())});
  return statements;
}

std::string nccl_version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? std::to_string(version) : "";
}

int64_t count_parameters(const config::Model& model) {
  int64_t count = 0;
  model::for_each_parameter(model, [&](const model::Parameter& parameter) {
    int64_t elements = 1;
    for (const int64_t dimension : parameter.shape) elements *= dimension;
    count += elements;
  });
  return count;
}

void add_data_files(const config::Data& data, Statements& statements) {
  if (data.source != "text") return;
  const std::vector<data::CorpusFile> files = data::list_corpus(data.path);
  if (files.empty()) statements.push_back({"what data.path names", "no file ('" + data.path + "')"});
  for (size_t i = 0; i < files.size(); ++i)
    statements.push_back({"data file " + std::to_string(i + 1),
                          "'" + files[i].name + "' of " + std::to_string(files[i].bytes) + " bytes"});
}

}  // namespace

void require_agreement(const config::Config& config, const std::string& program, comm::Bootstrap& bootstrap) {
  if (bootstrap.size() == 1) return;
  Statements statements{{"the program", program}, {"NCCL's version", nccl_version()}};
  std::ranges::move(statements_of(config, bootstrap), std::back_inserter(statements));
  statements.push_back({"the number of parameters", std::to_string(count_parameters(config.model))});
  add_data_files(config.data, statements);
  comm::agree(bootstrap, statements);
}

void require_same_choice(const config::Config& chosen, const std::string& hardware,
                         comm::Bootstrap& bootstrap) {
  Statements statements = statements_of(chosen, bootstrap);
  statements.push_back({"the hardware that parallel.policy auto takes times from", hardware});
  comm::agree(bootstrap, statements);
}

std::string identity_of_file(const std::string& path) {
  constexpr int64_t kPieces = 64, kPieceBytes = 16384;
  std::error_code error;
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error) return "not readable ('" + path + "': " + error.message() + ")";
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> piece(kPieceBytes);
  uint64_t checksum = 0xcbf29ce484222325;  // FNV-1a
  for (int64_t at = 0; at < bytes; at += std::max(kPieceBytes, bytes / kPieces)) {
    const int64_t count = std::min(kPieceBytes, bytes - at);
    if (!file.seekg(at).read(piece.data(), count))
      return "not readable ('" + path + "': " + std::strerror(errno != 0 ? errno : EIO) + ")";
    for (int64_t i = 0; i < count; ++i)
      checksum = (checksum ^ static_cast<unsigned char>(piece[static_cast<size_t>(i)])) * 0x100000001b3;
  }
  char text[64];
  std::snprintf(text, sizeof text, "a file of %lld bytes, checksum %016llx", static_cast<long long>(bytes),
                static_cast<unsigned long long>(checksum));
  return text;
}

}  // namespace minillm::train
