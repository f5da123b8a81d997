#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <bit>
#include <csignal>
#include <cstring>
#include <random>

#include "core/error.h"
#include "errors.h"
#include "temporary_folder.h"

namespace minillm::checkpoint {
namespace {

using test::expect_error;
using test::TemporaryFolder;

template <typename T>
std::span<const std::byte> bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// A file as the format's description has it, assembled without the writer.
std::string file_of(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return length + header + data;
}

std::string data_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

const std::vector<float> kMatrix{1.5f, -2.0f, 3.25f, 0.0f, 1e-40f, 6.0f};
const std::vector<uint16_t> kHalves{0x3f80, 0xc000, 0x7f80};  // 1, -2, infinity

std::vector<TensorEntry> sample_tensors() {
  return {{"matrix", DType::kFp32, {2, 3}}, {"half", DType::kBf16, {3}}, {"none", DType::kFp32, {0, 7}}};
}

void write_sample(const std::string& path) {
  SafetensorsWriter writer(path, sample_tensors(), {{"format", "pt"}, {"note", "a \"quoted\" text"}});
  writer.write(bytes(kMatrix).first(10));  // pieces need not be whole elements
  writer.write(bytes(kMatrix).subspan(10));
  writer.write(bytes(kHalves));
  writer.finish();
}

TEST(SafetensorsWriter, WritesTheFormatToTheByte) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m.safetensors");
  write_sample(path);
  std::string header = R"({"__metadata__":{"format":"pt","note":"a \"quoted\" text"},)"
                       R"("matrix":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                       R"("half":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},)"
                       R"("none":{"dtype":"F32","shape":[0,7],"data_offsets":[30,30]}})";
  while (header.size() % 8 != 0) header += ' ';
  const std::string halves("\x80\x3f\x00\xc0\x80\x7f", 6);
  EXPECT_EQ(folder.read("m.safetensors"), file_of(header, data_of(kMatrix) + halves));
}

TEST(SafetensorsWriter, TheFileAppearsOnlyWhenFinished) {
  const TemporaryFolder folder;
  const std::string path = folder.write("m.safetensors", "older");
  {
    SafetensorsWriter writer(path, {{"a", DType::kFp32, {6}}}, {});
    writer.write(bytes(kMatrix).first(20));
    expect_error<InternalError>([&] { writer.finish(); }, {path, "20 of 24"});
    expect_error<InternalError>([&] { writer.write(bytes(kMatrix).first(5)); }, {path, "24"});
    EXPECT_EQ(folder.read("m.safetensors"), "older");
  }
  EXPECT_EQ(folder.read("m.safetensors"), "older");
}

TEST(SafetensorsWriter, Errors) {
  const TemporaryFolder folder;
  expect_error<InputError>([&] { SafetensorsWriter(folder.path("no/m"), {}, {}); },
                           {folder.path("no/m"), "No such"});
  const auto make = [&](const std::vector<TensorEntry>& tensors) {
    SafetensorsWriter(folder.path("m"), tensors, {});
  };
  expect_error<InternalError>(
      [&] {
        make({{"a", DType::kFp32, {1}}, {"a", DType::kFp32, {2}}});
      },
      {"'a'", "taken"});
  expect_error<InternalError>([&] { make({{"__metadata__", DType::kFp32, {1}}}); }, {"__metadata__"});
  expect_error<InternalError>(
      [&] {
        make({{"a", DType::kFp32, {int64_t{1} << 40, 1 << 23}}});
      },
      {"'a'", "64 bits"});
  expect_error<InternalError>([&] { make({{"a", DType::kFp32, {-1}}}); }, {"'a'"});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("")));
}

TEST(SafetensorsWriter, AFullDiskIsReported) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{1 << 16, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::vector<float> values(1 << 16);
  expect_error<InputError>(
      [&] {
        SafetensorsWriter writer(path, {{"a", DType::kFp32, {1 << 16}}}, {});
        writer.write(bytes(values));
        writer.finish();
      },
      {path, "cannot be written", "a file may have 65536", "ulimit"});
  setrlimit(RLIMIT_FSIZE, &old);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("")));
}

TEST(SafetensorsReader, ReadsWhatWasWritten) {
  const TemporaryFolder folder;
  write_sample(folder.path("m"));
  const SafetensorsReader reader(folder.path("m"));
  ASSERT_EQ(reader.tensors().size(), 3u);
  EXPECT_EQ(reader.metadata().at("note"), "a \"quoted\" text");

  const TensorEntry& matrix = reader.find("matrix");
  EXPECT_EQ(matrix.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(matrix.elements(), 6);
  std::vector<float> values(6);
  reader.read(matrix, 0, values);
  EXPECT_EQ(values, kMatrix);
  reader.read(matrix, 4, std::span(values).first(2));
  EXPECT_EQ(values[0], kMatrix[4]);
  EXPECT_EQ(values[1], kMatrix[5]);

  std::vector<float> halves(2);
  reader.read(reader.find("half"), 1, halves);
  EXPECT_EQ(halves[0], -2.0f);
  EXPECT_EQ(halves[1], std::numeric_limits<float>::infinity());

  reader.read(reader.find("none"), 0, {});
  EXPECT_THROW(reader.read(matrix, 5, halves), InternalError);
  EXPECT_THROW(reader.read(matrix, -1, halves), InternalError);
  expect_error<InputError>([&] { reader.find("matrx"); }, {folder.path("m"), "'matrx'", "similar", "matrix"});
}

TEST(SafetensorsReader, ReadsFilesOfOthers) {
  // Another order in the header, no metadata, no padding, unknown members.
  const TemporaryFolder folder;
  const std::string path =
      folder.write("m", file_of(R"({"b":{"dtype":"F32","shape":[],"data_offsets":[8,12],"extra":null},)"
                                R"("a":{"shape":[2],"data_offsets":[0,8],"dtype":"F32"}})",
                                data_of({1, 2, 3})));
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors().front().name, "a");
  float scalar = 0;
  reader.read(reader.find("b"), 0, std::span(&scalar, 1));
  EXPECT_EQ(scalar, 3.0f);
}

TEST(SafetensorsReader, MalformedFiles) {
  const TemporaryFolder folder;
  const auto expect_malformed = [&](const std::string& contents, std::initializer_list<std::string> parts) {
    SCOPED_TRACE(contents);
    const std::string path = folder.write("bad.safetensors", contents);
    expect_error<InputError>([&] { SafetensorsReader reader(path); }, parts);
    expect_error<InputError>([&] { SafetensorsReader reader(path); }, {path});
  };
  const auto tensor = [](const char* dtype, const char* shape, const char* offsets) {
    return std::string("{\"dtype\":") + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const auto one = [&](const char* dtype, const char* shape, const char* offsets) {
    return file_of("{\"w\":" + tensor(dtype, shape, offsets) + "}", std::string(8, 'x'));
  };
  expect_malformed("", {"empty"});
  expect_malformed("1234567", {"8 bytes"});
  expect_malformed(std::string(8, '\xff') + "{}", {"header of 18446744073709551615 bytes"});
  expect_malformed(file_of("{}", "").substr(0, 9), {"header of 2 bytes in a file of 9"});
  expect_malformed(file_of("[]", ""), {"'{'"});
  expect_malformed(file_of(" {}", ""), {"'{'"});
  expect_malformed(file_of("{\"a\":", ""), {"not valid JSON", "line 1"});
  expect_malformed(file_of("{}", "x"), {"take 0 bytes", "holds 1"});
  expect_malformed(file_of(R"({"__metadata__":{"a":1}})", ""), {"__metadata__.a", "not a string"});
  expect_malformed(file_of(R"({"__metadata__":[]})", ""), {"__metadata__"});
  expect_malformed(file_of(R"({"w":5})", ""), {"'w'", "dtype"});
  expect_malformed(file_of(R"({"w":{"dtype":"F32","shape":[2]}})", ""), {"'w'", "data_offsets"});
  expect_malformed(one("\"F16\"", "[3]", "[0,8]"), {"'w'", "6 bytes", "hold 8"});
  expect_malformed(one("\"F4\"", "[17]", "[0,8]"), {"'w'", "whole number of bytes"});
  expect_malformed(one("3", "[4]", "[0,8]"), {"'w'", "3 (an integer)"});
  expect_malformed(one("\"F32\"", "[-2]", "[0,8]"), {"'w'", "shape"});
  expect_malformed(one("\"F32\"", "[2.0]", "[0,8]"), {"'w'", "shape"});
  expect_malformed(one("\"F32\"", "2", "[0,8]"), {"'w'", "shape"});
  expect_malformed(one("\"F32\"", "[4611686018427387906]", "[0,8]"), {"'w'", "64 bits"});
  expect_malformed(one("\"F32\"", "[2]", "[0]"), {"'w'", "data_offsets"});
  expect_malformed(one("\"F32\"", "[2]", "[8,0]"), {"'w'", "data_offsets"});
  expect_malformed(one("\"F32\"", "[2]", "[0,9223372036854775808]"), {"'w'", "data_offsets"});
  expect_malformed(one("\"F32\"", "[3]", "[0,8]"), {"'w'", "12 bytes", "hold 8"});
  expect_malformed(one("\"F32\"", "[2]", "[4,12]"), {"'w'", "begins at byte 4", "byte 0"});
  expect_malformed(one("\"F32\"", "[4]", "[0,16]"), {"16 bytes", "holds 8", "truncated"});

  const std::string first = tensor("\"F32\"", "[1]", "[0,4]"), overlap = tensor("\"F32\"", "[1]", "[2,6]");
  expect_malformed(file_of("{\"a\":" + first + ",\"b\":" + overlap + "}", "xxxxxx"),
                   {"'b'", "byte 2", "byte 4"});
  expect_malformed(file_of("{\"a\":" + first + ",\"a\":" + first + "}", "xxxx"), {"'a'", "twice"});
  expect_malformed(file_of(std::string(100000, '['), ""), {"'{'"});
  expect_malformed(file_of("{\"a\":" + std::string(100000, '['), ""), {"nested more than 64 deep"});
  expect_malformed(file_of(std::string("{}\0", 3), ""), {"not valid JSON", "byte 2 is NUL"});
  expect_error<InputError>([&] { SafetensorsReader reader(folder.path("absent")); },
                           {"absent", "No such file"});
  expect_error<InputError>([&] { SafetensorsReader reader(folder.path("")); }, {"Is a directory"});
}

TEST(SafetensorsReader, TensorsThatNobodyAskedForHaveAnyType) {
  const TemporaryFolder folder;
  const SafetensorsReader reader(
      folder.write("mixed", file_of(R"({
    "steps": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
    "mask": {"dtype": "BOOL", "shape": [3], "data_offsets": [8, 11]},
    "nibbles": {"dtype": "F4", "shape": [2], "data_offsets": [11, 12]},
    "of the future": {"dtype": "X7", "shape": [5], "data_offsets": [12, 19]},
    "w": {"dtype": "F32", "shape": [1], "data_offsets": [19, 23]}})",
                                    std::string(19, 'x') + std::string("\0\0\0\x40", 4))));
  float value = 0;
  reader.read(reader.find("w"), 0, std::span(&value, 1));
  EXPECT_EQ(value, 2.0f);
  expect_error<InputError>([&] { reader.find("steps"); }, {"'steps'", "\"I64\"", "\"F32\"", "\"BF16\""});
  expect_error<InputError>([&] { reader.find("of the future"); }, {"\"X7\""});
}

TEST(SafetensorsReader, WhatHasNoPositionsIsRefused) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  expect_error<InputError>([&] { SafetensorsReader reader(folder.path("pipe")); },
                           {"pipe", "not a regular file"});
}

TEST(SafetensorsReader, RandomDamageIsAnErrorOrHarmless) {
  const TemporaryFolder folder;
  write_sample(folder.path("good"));
  const std::string good = folder.read("good");
  const size_t header = good.size() - 30;
  std::mt19937 random(1);
  const auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  int refused = 0, accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bad = good;
    // Mostly characters that mean something to JSON, so that the damage gets past its grammar.
    constexpr std::string_view kAlphabet = "0123456789[]{},:\"-.eE ";
    for (size_t edits = 1 + below(3); edits > 0; --edits) {
      const char c = below(4) == 0 ? static_cast<char>(below(256)) : kAlphabet[below(kAlphabet.size())];
      bad[below(10) == 0 ? below(8) : below(header)] = c;
    }
    if (below(5) == 0) bad.resize(below(bad.size()));
    const std::string path = folder.write("bad", bad);
    try {
      const SafetensorsReader reader(path);
      for (const TensorEntry& tensor : reader.tensors()) {
        ASSERT_LE(tensor.elements(), 15);
        if (!tensor.other_type.empty()) continue;
        std::vector<float> values(tensor.elements());
        reader.read(tensor, 0, values);
      }
      ++accepted;
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 100);  // a changed letter in a name or in the metadata
}

TEST(SafetensorsReader, AFileThatShrinksIsReported) {
  const TemporaryFolder folder;
  write_sample(folder.path("m"));
  const SafetensorsReader reader(folder.path("m"));
  std::filesystem::resize_file(folder.path("m"), 200);
  std::vector<float> values(6);
  expect_error<InputError>([&] { reader.read(reader.find("matrix"), 0, values); },
                           {"'matrix'", "cannot be read"});
}

}  // namespace
}  // namespace minillm::checkpoint
