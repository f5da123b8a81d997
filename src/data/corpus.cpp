#include "data/corpus.h"

#include <glob.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/text_file.h"

namespace minillm::data {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_search(const std::string& pattern, const std::string& path, int error) {
  throw InputError("data.path: '" + pattern + "' cannot be searched: " + path + ": " + std::strerror(error));
}

/// What kept glob() from reading a folder. It takes a function without a context.
thread_local std::pair<std::string, int> obstacle;
int remember(const char* path, int error) {
  if (error == ENOENT) return 0;
  obstacle = {path, error};
  return 1;  // and end: a corpus without some of its files is another one
}

std::vector<std::string> matching_paths(const std::string& pattern) {
  std::error_code error;
  if (fs::is_regular_file(pattern, error)) return {pattern};  // its name may hold characters that globs treat
  if (error == std::errc::permission_denied) cannot_search(pattern, pattern, error.value());
  glob_t matches{};
  const std::unique_ptr<glob_t, decltype(&globfree)> owner(&matches, globfree);
  const int status = glob(pattern.c_str(), GLOB_NOSORT, remember, &matches);
  if (status == GLOB_ABORTED) cannot_search(pattern, obstacle.first, obstacle.second);
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
  std::vector<std::string> paths(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  std::ranges::sort(paths);
  return paths;
}

void check_bytes(const std::string& path, const std::vector<uint8_t>& bytes, int64_t first,
                 int64_t vocab_size) {
  const auto bad =
      std::find_if(bytes.begin() + first, bytes.end(), [&](uint8_t b) { return b >= vocab_size; });
  if (bad == bytes.end()) return;
  throw InputError(path + ": byte " + std::to_string(bad - bytes.begin() - first) + " has the value " +
                   std::to_string(*bad) + "; model.vocab_size is " + std::to_string(vocab_size) +
                   ", so values must be below it. 256 fits every file");
}

void append_file(const std::string& path, int64_t vocab_size, Corpus& corpus) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) return;
  require_regular_file(path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  const auto size = file ? fs::file_size(path, error) : 0;
  if (!file || error)
    throw InputError(path + ": cannot read: " + (error ? error.message() : std::strerror(errno)));
  if (size == 0) throw InputError(path + ": the file is empty; remove it from data.path");

  const auto first = static_cast<int64_t>(corpus.bytes.size());
  corpus.bytes.resize(first + size);
  if (!file.read(reinterpret_cast<char*>(corpus.bytes.data() + first), static_cast<std::streamsize>(size)))
    throw InputError(path + ": cannot read its " + std::to_string(size) + " bytes, only " +
                     std::to_string(file.gcount()));
  check_bytes(path, corpus.bytes, first, vocab_size);
  ++corpus.files;
}

}  // namespace

Corpus read_corpus(const std::string& pattern, int64_t vocab_size) {
  Corpus corpus;
  for (const std::string& path : matching_paths(pattern)) append_file(path, vocab_size, corpus);
  if (corpus.files == 0) {
    std::error_code ignored;
    const bool folder = fs::is_directory(pattern, ignored);
    throw InputError("data.path: no file matches '" + pattern + "'" +
                     (folder ? "; it is a folder, write '" + pattern + "/*' for the files in it" : ""));
  }
  return corpus;
}

std::vector<CorpusFile> list_corpus(const std::string& pattern) {
  std::vector<CorpusFile> files;
  for (const std::string& path : matching_paths(pattern)) {
    std::error_code error;
    if (fs::is_directory(path, error)) continue;
    const auto bytes = static_cast<int64_t>(fs::file_size(path, error));
    if (error) return {};
    files.push_back({fs::path(path).filename().string(), bytes});
  }
  return files;
}

}  // namespace minillm::data
