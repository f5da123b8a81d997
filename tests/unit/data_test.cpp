#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "core/error.h"
#include "data/corpus.h"
#include "data/permutation.h"
#include "data/token_source.h"
#include "errors.h"
#include "temporary_folder.h"

namespace minillm::data {
namespace {

using test::expect_error;
using test::TemporaryFolder;

struct Sequence {
  std::vector<int32_t> tokens, targets;
  bool operator==(const Sequence&) const = default;
};

Sequence read(const TokenSource& source, int64_t sample, int64_t length) {
  Sequence s{std::vector<int32_t>(length, -1), std::vector<int32_t>(length, -1)};
  source.read(sample, s.tokens, s.targets);
  return s;
}

config::Config random_config() {
  config::Config config;
  config.model.vocab_size = 1000;
  config.train.seq_len = 64;
  return config;
}

config::Config text_config(const std::string& path, int64_t seq_len) {
  config::Config config;
  config.model.vocab_size = 256;
  config.train.seq_len = seq_len;
  config.data.source = "text";
  config.data.path = path;
  return config;
}

std::vector<int64_t> permutation(int64_t count, uint64_t key) {
  std::vector<int64_t> image(count);
  for (int64_t i = 0; i < count; ++i) image[i] = permute(i, count, key);
  return image;
}

TEST(Permutation, IsABijection) {
  for (const int64_t count : {1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025, 4097}) {
    for (const uint64_t key : {0ull, 1ull, ~0ull}) {
      std::vector<int64_t> image = permutation(count, key);
      std::ranges::sort(image);
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(image[i], i) << count << " " << key;
    }
  }
}

TEST(Permutation, DependsOnTheKeyAndShuffles) {
  constexpr int64_t kCount = 1000;
  const auto first = permutation(kCount, 1), second = permutation(kCount, 2);
  EXPECT_EQ(first, permutation(kCount, 1));
  int64_t equal = 0, fixed = 0, neighbours = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    equal += first[i] == second[i];
    fixed += first[i] == i;
    neighbours += i > 0 && std::abs(first[i] - first[i - 1]) == 1;
  }
  // Each count is near Poisson with mean 1, 1 and 2; above 12 has a probability below 1e-6.
  EXPECT_LE(equal, 12);
  EXPECT_LE(fixed, 12);
  EXPECT_LE(neighbours, 12);
}

TEST(Permutation, SmallOnesReachEveryOrder) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t key = 0; key < 500; ++key) orders.insert(permutation(4, key));
  EXPECT_EQ(orders.size(), 24u);
}

TEST(Permutation, WorksOnHugeRanges) {
  const int64_t count = (int64_t{1} << 62) + 12345;
  for (const int64_t i : {int64_t{0}, int64_t{1}, count - 1}) {
    const int64_t image = permute(i, count, 7);
    EXPECT_GE(image, 0);
    EXPECT_LT(image, count);
  }
  EXPECT_THROW(permute(5, 5, 0), InternalError);
  EXPECT_THROW(permute(-1, 5, 0), InternalError);
}

TEST(RandomTokens, ArePureFunctionsOfSeedAndSample) {
  config::Config config = random_config();
  const auto source = make_token_source(config), again = make_token_source(config);
  EXPECT_EQ(read(*source, 5, 64), read(*again, 5, 64));
  EXPECT_NE(read(*source, 5, 64), read(*source, 6, 64));
  EXPECT_NE(read(*source, 5, 64).tokens, read(*source, 5, 64).targets);
  config.train.seed = 1;
  EXPECT_NE(read(*source, 5, 64), read(*make_token_source(config), 5, 64));
}

TEST(RandomTokens, AreUniformBelowTheVocabulary) {
  config::Config config = random_config();
  config.model.vocab_size = 10;
  const auto source = make_token_source(config);
  std::vector<int64_t> tokens(10), targets(10);
  for (int64_t sample = 0; sample < 1000; ++sample) {
    const Sequence s = read(*source, sample, 64);
    for (const int32_t token : s.tokens) ++tokens.at(token);
    for (const int32_t target : s.targets) ++targets.at(target);
  }
  // 64000 draws: 6400 each, standard deviation 76; five of them.
  for (int i = 0; i < 10; ++i) {
    EXPECT_NEAR(static_cast<double>(tokens[i]), 6400, 380);
    EXPECT_NEAR(static_cast<double>(targets[i]), 6400, 380);
  }
}

TEST(Batches, TheGlobalOrderIsTheSameAtAnyWorldSize) {
  constexpr int64_t kLength = 16, kSequences = 12;  // of a step
  const auto source = make_token_source(random_config());
  const auto global_step = [&](int64_t step, int world) {
    const int64_t batch = kSequences / world;
    Sequence all;
    for (int rank = 0; rank < world; ++rank) {
      Sequence part{std::vector<int32_t>(batch * kLength), std::vector<int32_t>(batch * kLength)};
      read_batch(*source, step, world, rank, batch, part.tokens, part.targets);
      all.tokens.insert(all.tokens.end(), part.tokens.begin(), part.tokens.end());
      all.targets.insert(all.targets.end(), part.targets.begin(), part.targets.end());
    }
    return all;
  };
  const Sequence alone = global_step(3, 1);
  for (const int world : {2, 3, 4, 6, 12}) EXPECT_EQ(global_step(3, world), alone) << world;
  EXPECT_NE(global_step(4, 1), alone);

  const Sequence sample = read(*source, 3 * kSequences + 5, kLength);
  EXPECT_TRUE(std::equal(sample.tokens.begin(), sample.tokens.end(), alone.tokens.begin() + 5 * kLength));
}

TEST(Batches, SizesMustAgree) {
  const auto source = make_token_source(random_config());
  std::vector<int32_t> seven(7), eight(8);
  EXPECT_THROW(read_batch(*source, 0, 1, 0, 2, seven, seven), InternalError);
  EXPECT_THROW(read_batch(*source, 0, 1, 0, 2, eight, seven), InternalError);
}

/// 1 + windows · length bytes whose values tell their position.
std::string counting_text(int64_t bytes) {
  std::string text(bytes, '\0');
  for (int64_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i % 251);
  return text;
}

TEST(TextTokens, EveryEpochVisitsEveryWindowOnceInAnOrderOfItsOwn) {
  constexpr int64_t kLength = 5, kWindows = 40;
  const TemporaryFolder folder;
  // Four bytes more than the windows need are never a target.
  const auto source =
      make_token_source(text_config(folder.write("a", counting_text(kWindows * kLength + 1 + 4)), kLength));

  std::vector<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t i = 0; i < kWindows; ++i) {
      const Sequence s = read(*source, epoch * kWindows + i, kLength);
      EXPECT_EQ(s.tokens[0] % kLength, 0);
      for (int64_t t = 0; t < kLength; ++t) {
        EXPECT_EQ(s.tokens[t], s.tokens[0] + t);
        EXPECT_EQ(s.targets[t], s.tokens[t] + 1);
      }
      order.push_back(s.tokens[0] / kLength);
    }
    orders.push_back(order);
    std::ranges::sort(order);
    for (int64_t i = 0; i < kWindows; ++i) ASSERT_EQ(order[i], i) << "epoch " << epoch;
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  EXPECT_NE(orders[0], orders[2]);
}

TEST(TextTokens, ABatchMayCrossTheEpoch) {
  constexpr int64_t kLength = 4, kWindows = 3, kBatch = 2;
  const TemporaryFolder folder;
  const auto source = make_token_source(text_config(folder.write("a", counting_text(13)), kLength));
  std::vector<int32_t> tokens(kBatch * kLength), targets(kBatch * kLength);
  read_batch(*source, 1, 1, 0, kBatch, tokens,
             targets);  // samples 2 and 3: the last of epoch 0, the first of 1
  const Sequence last = read(*source, kWindows - 1, kLength), first = read(*source, kWindows, kLength);
  EXPECT_TRUE(std::equal(last.tokens.begin(), last.tokens.end(), tokens.begin()));
  EXPECT_TRUE(std::equal(first.targets.begin(), first.targets.end(), targets.begin() + kLength));
}

TEST(TextTokens, TheOrderDependsOnTheSeed) {
  const TemporaryFolder folder;
  config::Config config = text_config(folder.write("a", counting_text(201)), 5);
  const auto order = [&] {
    std::vector<int32_t> order;
    for (int64_t i = 0; i < 40; ++i) order.push_back(read(*make_token_source(config), i, 5).tokens[0]);
    return order;
  };
  const auto first = order();
  config.train.seed = 1;
  EXPECT_NE(order(), first);
}

TEST(TextTokens, FilesAreSortedByPathFoldersSkippedLinksFollowed) {
  const TemporaryFolder folder;
  folder.write("b", "cd");
  folder.write("a", "ab");
  folder.write("B", "xy");  // byte order: before the small letters in every locale
  std::filesystem::create_directory(folder.path("aa"));
  std::filesystem::create_symlink(folder.path("b"), folder.path("c"));
  const auto source = make_token_source(text_config(folder.path("*"), 7));
  const Sequence s = read(*source, 0, 7);
  EXPECT_EQ(std::string(s.tokens.begin(), s.tokens.end()), "xyabcdc");
  EXPECT_EQ(s.targets.back(), 'd');
  EXPECT_NE(source->describe().find("4 files, 8 bytes, 1 windows of 7"), std::string::npos)
      << source->describe();
}

TEST(Corpus, TheListIsWhatIsReadWithoutReadingIt) {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b", "c.d"}) std::filesystem::create_directory(folder.path(name));
  folder.write("b/1", "xx"), folder.write("a/2", "x"), folder.write("a/10", "xxx");
  std::filesystem::create_directory(folder.path("a/folder"));
  std::string listed;
  for (const CorpusFile& file : list_corpus(folder.path("[ab]/*")))
    listed += file.name + ":" + std::to_string(file.bytes) + " ";
  EXPECT_EQ(listed, "10:3 2:1 1:2 ");
  EXPECT_TRUE(list_corpus(folder.path("none*")).empty());
  EXPECT_TRUE(list_corpus(folder.path("c.d/*")).empty());
  std::filesystem::create_symlink("nothing", folder.path("c.d/link"));
  EXPECT_TRUE(list_corpus(folder.path("c.d/*")).empty());
}

TEST(TextTokens, HighBytesAreNotNegative) {
  const TemporaryFolder folder;
  const auto source = make_token_source(text_config(folder.write("a[1]", "\xff\xfe\x80"), 2));
  EXPECT_EQ(read(*source, 0, 2), (Sequence{{255, 254}, {254, 128}}));
}

TEST(TextTokens, Errors) {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name, int64_t seq_len) {
    return make_token_source(text_config(folder.path(name), seq_len));
  };
  expect_error<InputError>([&] { make("*.txt", 4); }, {"data.path", "no file matches", "*.txt"});
  expect_error<InputError>([&] { make("", 4); }, {"no file matches", "it is a folder", "/*'"});

  folder.write("short", "1234");
  expect_error<InputError>([&] { make("short", 4); }, {"4 bytes", "needs 5", "train.seq_len"});
  EXPECT_NO_THROW(make("short", 3));
  expect_error<InternalError>([&] { read(*make("short", 3), 0, 2); }, {"2 tokens"});

  folder.write("empty", "");
  expect_error<InputError>([&] { make("*", 2); }, {folder.path("empty"), "the file is empty"});
  std::filesystem::remove(folder.path("empty"));

  std::filesystem::create_symlink(folder.path("nowhere"), folder.path("dangling"));
  expect_error<InputError>([&] { make("*", 2); }, {folder.path("dangling"), "No such file"});
  std::filesystem::remove(folder.path("dangling"));

  ASSERT_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  expect_error<InputError>([&] { make("*", 2); }, {folder.path("pipe"), "not a regular file"});
  std::filesystem::remove(folder.path("pipe"));

  folder.write("second", "0123456z");
  config::Config config = text_config(folder.path("s*"), 2);
  config.model.vocab_size = 'z';
  expect_error<InputError>([&] { make_token_source(config); },
                           {folder.path("second"), "byte 7", "value 122", "model.vocab_size is 122"});
  config.model.vocab_size = 'z' + 1;
  EXPECT_NO_THROW(make_token_source(config));
}

/// Another user while it lives: permissions do not bind root.
class SomebodyElse {
 public:
  SomebodyElse() : changed_(geteuid() == 0 && seteuid(65534) == 0) {}
  ~SomebodyElse() {
    if (changed_) (void)!seteuid(0);
  }
  SomebodyElse(const SomebodyElse&) = delete;
  SomebodyElse& operator=(const SomebodyElse&) = delete;

 private:
  bool changed_;
};

TEST(TextTokens, FoldersThatCannotBeReadAreNamed) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("secret"));
  folder.write("secret/a.txt", "0123456789");
  ASSERT_EQ(chmod(folder.path("").c_str(), 0755), 0);
  ASSERT_EQ(chmod(folder.path("secret").c_str(), 0), 0);
  {
    const SomebodyElse user;
    if (geteuid() == 0) GTEST_SKIP() << "root cannot become somebody else here";
    for (const char* pattern : {"secret/*", "*/*.txt", "secret/a.txt"})
      expect_error<InputError>([&] { make_token_source(text_config(folder.path(pattern), 4)); },
                               {"data.path", pattern, folder.path("secret"), "Permission denied"});
    expect_error<InputError>([&] { make_token_source(text_config(folder.path("absent/*"), 4)); },
                             {"no file matches"});
  }
  ASSERT_EQ(chmod(folder.path("secret").c_str(), 0755), 0);
}

TEST(TokenSource, UnknownSourceAndMissingPath) {
  config::Config config = text_config("", 4);
  expect_error<UsageError>([&] { make_token_source(config); }, {"data.path"});
  config.data.source = "web";
  expect_error<UsageError>([&] { make_token_source(config); }, {"data.source", "'web'", "random", "text"});
}

}  // namespace
}  // namespace minillm::data
