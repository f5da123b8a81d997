// Expectations on errors: the type, and the parts that a message has to have.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace minillm::test {

/// Runs `work`, which has to throw an ErrorType, and demands every part in its message.
template <typename ErrorType, typename Work>
void expect_error(Work&& work, std::initializer_list<std::string> parts) {
  try {
    work();
    ADD_FAILURE() << "no error; expected one about " << *parts.begin();
  } catch (const ErrorType& error) {
    const std::string message = error.what();
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

}  // namespace minillm::test
