// A configuration; the same text is also the model of a weights file, and, by lines, arguments of --set.
#include <sstream>

#include "config/config.h"
#include "documented.h"

using namespace minillm;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text = test::text_of(data, size);
  test::expect_documented([&] {
    const config::Config config = config::parse(text, "config", {});
    if (config::to_json(config::parse(config::to_json(config), "again", {})) != config::to_json(config))
      throw InternalError("what was printed is read as something else");
  });
  test::expect_documented([&] { (void)config::model_from_json(text, "metadata"); });
  std::istringstream lines(text);
  constexpr int kMostLines = 8;  // the time is better spent on other texts
  std::string line;
  for (int i = 0; i < kMostLines && std::getline(lines, line); ++i)
    test::expect_documented([&] { (void)config::parse("{}", "config", {line}); });
  return 0;
}
