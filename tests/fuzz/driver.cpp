// Runs a fuzz target on files as they are and on mutations of them, the same ones in every run. A target
// returns for whatever the project's documented errors are and throws anything else.
//
// Not coverage-guided: what is under test is what happens after a JSON library has taken a text apart, and
// values exchanged in valid files get there at once. The targets have the signature of libFuzzer's, so that
// `clang++ -fsanitize=fuzzer` can drive them, too.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/number.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Of AddressSanitizer, where the build has it.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

using namespace std::string_view_literals;

std::string input;  // what the target is given, to be found after a crash
std::string crash_file;

constexpr std::string_view kValues[] = {"0"sv,
                                        "-0"sv,
                                        "1"sv,
                                        "-1"sv,
                                        "2"sv,
                                        "3"sv,
                                        "007"sv,
                                        "0x10"sv,
                                        "255"sv,
                                        "256"sv,
                                        "65536"sv,
                                        "1048577"sv,
                                        "2147483647"sv,
                                        "2147483648"sv,
                                        "4294967296"sv,
                                        "9007199254740993"sv,
                                        "9223372036854775807"sv,
                                        "9223372036854775808"sv,
                                        "-9223372036854775808"sv,
                                        "18446744073709551615"sv,
                                        "18446744073709551616"sv,
                                        "99999999999999999999"sv,
                                        "0.5"sv,
                                        "1.0"sv,
                                        "1e3"sv,
                                        "1e-300"sv,
                                        "-1e300"sv,
                                        "1e308"sv,
                                        "1e400"sv,
                                        "5e-324"sv,
                                        "nan"sv,
                                        "NaN"sv,
                                        "inf"sv,
                                        "-Infinity"sv,
                                        "null"sv,
                                        "true"sv,
                                        "false"sv,
                                        "\"\""sv,
                                        "\"x\""sv,
                                        "\"\\u0000\""sv,
                                        "\"\\ud800\""sv,
                                        "\"\xff\""sv,
                                        "[]"sv,
                                        "[1]"sv,
                                        "{}"sv,
                                        "{\"a\":1,\"a\":1}"sv,
                                        "[[[[[[[[[[[[[[[["sv,
                                        "\0"sv,
                                        "\xef\xbb\xbf"sv,
                                        " "sv,
                                        "\n"sv,
                                        ","sv,
                                        ":"sv,
                                        "\""sv,
                                        "}"sv,
                                        "="sv,
                                        "."sv,
                                        "\"bf16\""sv,
                                        "\"F32\""sv,
                                        "\"I64\""sv,
                                        "\"F4\""sv};

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }

  std::string mutated(std::string text, const std::vector<std::string>& seeds) {
    for (size_t changes = 1 + below(3); changes > 0; --changes) change(text, seeds);
    return text;
  }

 private:
  void change(std::string& text, const std::vector<std::string>& seeds) {
    const size_t at = below(text.size() + 1), length = std::min(below(16) + 1, text.size() - at);
    switch (below(10)) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(at, text.substr(at, length));
        break;
      case 2:
        text.insert(at, 1, static_cast<char>(below(256)));
        break;
      case 3:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ 1 << below(8));
        break;
      case 4:
        text.resize(at);
        break;
      case 5: {
        const std::string& other = seeds[below(seeds.size())];
        text = text.substr(0, at) + other.substr(std::min(at, other.size()));
        break;
      }
      case 6:
        text.insert(at, value());
        break;
      default:
        exchange_value(text, at);
    }
  }

  std::string value() {
    if (below(100) == 0) return std::string(100000, '[');
    return std::string(kValues[below(std::size(kValues))]);
  }

  /// Puts a value in the place of the first one from `at` on: a string with its quotes, or a word.
  void exchange_value(std::string& text, size_t at) {
    const auto is_word = [](char c) {
      return std::strchr("+-.", c) ? c != 0 : std::isalnum(static_cast<unsigned char>(c)) != 0;
    };
    while (at < text.size() && text[at] != '"' && !is_word(text[at])) ++at;
    size_t end = at;
    if (end < text.size() && text[end] == '"') {
      end = std::min(text.find('"', at + 1), text.size() - 1) + 1;
    } else {
      while (end < text.size() && is_word(text[end])) ++end;
    }
    text.replace(at, end - at, value());
  }

  std::mt19937_64 random_;
};

void save_input() {
  std::ofstream(crash_file, std::ios::binary) << input;
  std::cerr << "the input that did it is in " << crash_file << std::endl;
}

bool survives(std::string text) {
  input = std::move(text);
  try {
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    return true;
  } catch (const std::exception& error) {
    std::cerr << "not one of the documented errors: " << error.what() << std::endl;
    save_input();
    return false;
  }
}

int usage() {
  std::cerr << "usage: fuzz_TARGET [--runs N] [--seconds N] FILE...\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> seeds;
  int64_t runs = 500, seconds = 0;
  crash_file = std::string(argv[0]) + ".crash";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--runs" || argument == "--seconds") {
      const auto number = ++i < argc ? minillm::parse_number<int64_t>(argv[i]) : std::nullopt;
      if (!number) return usage();
      (argument == "--runs" ? runs : seconds) = *number;
      continue;
    }
    std::ifstream file(argument, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file && seeds.back().empty()) return usage();
  }
  if (seeds.empty()) return usage();
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(save_input);

  for (const std::string& seed : seeds)
    if (!survives(seed)) return 1;
  Mutator mutator(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t done = 0;
  for (; seconds > 0 ? std::chrono::steady_clock::now() < end : done < runs; ++done)
    if (!survives(mutator.mutated(seeds[mutator.below(seeds.size())], seeds))) return 1;
  std::cout << done << " mutations of " << seeds.size() << " files" << std::endl;
  return 0;
}
