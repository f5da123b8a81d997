// The bytes of the files that a pattern names, in memory: a corpus of a few gigabytes fits each rank's host
// many times over, and a read from it can neither fail nor wait. Larger corpora belong to a source of their
// own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minillm::data {

struct Corpus {
  std::vector<uint8_t> bytes;
  int64_t files = 0;
};

/// Reads and joins the files that `pattern` (a path or a glob) names, sorted by path byte by byte, so that
/// locale and file system do not matter. Folders that a glob matches are skipped, links followed. Throws
/// InputError when no file matches, when a folder on the way cannot be read, or when a file is unreadable,
/// empty, not regular, or holds a byte >= vocab_size (file, position, value).
Corpus read_corpus(const std::string& pattern, int64_t vocab_size);

/// A file of a corpus, without its folder.
struct CorpusFile {
  std::string name;
  int64_t bytes = 0;
};

/// The files that read_corpus() would read, in its order, unread; none where there are none or a file has no
/// size.
std::vector<CorpusFile> list_corpus(const std::string& pattern);

}  // namespace minillm::data
