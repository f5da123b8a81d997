#include "comm/failure.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

namespace minillm::comm {
namespace {

TEST(Failure, ExitCodesOfErrorsThatAreNotTheProjects) {
  EXPECT_EQ(exit_code(std::bad_alloc()), ExitCode::kMemory);
  EXPECT_NE(describe(std::bad_alloc()).find("host"), std::string::npos);
  EXPECT_EQ(exit_code(std::bad_array_new_length()), ExitCode::kMemory);
  EXPECT_EQ(exit_code(std::runtime_error("x")), ExitCode::kInternal);
  EXPECT_EQ(describe(std::runtime_error("x")), "x");
}

}  // namespace
}  // namespace minillm::comm
