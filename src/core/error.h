// Errors that the program reports to its user, each with the exit code that it ends the process with.
//
// Goals: few types; a message that says what is wrong, where, the value found, the values allowed and what to
// do; the exit code is part of the type, so that job scripts can tell "fix the config" from "try again".
// Non-goals: recovery inside a step. An error travels as an exception to main, which ends all ranks.
#pragma once

#include <stdexcept>
#include <string>

namespace minillm {

/// Exit codes of the `minillm` program (documented in README.md).
enum class ExitCode : int {
  kOk = 0,
  kInternal = 1,        ///< a defect in minillm itself
  kUsage = 2,           ///< command line or configuration
  kInput = 3,           ///< a file or data: missing, unreadable, malformed, unwritable
  kMemory = 4,          ///< the plan does not fit the device
  kDevice = 5,          ///< CUDA, cuBLASLt or a kernel failed
  kCommunication = 86,  ///< NCCL or MPI failed, ranks disagreed, or a collective timed out
  kNumerics = 87,       ///< training produced no finite values; retrying does not help
};

/// Base of every error thrown by this project.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// A command line or configuration value that is not allowed.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message) : Error(ExitCode::kUsage, message) {}
};
/// A file or its contents.
class InputError : public Error {
 public:
  explicit InputError(const std::string& message) : Error(ExitCode::kInput, message) {}
};
/// The planned memory exceeds the device's.
class MemoryError : public Error {
 public:
  explicit MemoryError(const std::string& message) : Error(ExitCode::kMemory, message) {}
};
/// A CUDA runtime, cuBLASLt or kernel failure.
class DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message) : Error(ExitCode::kDevice, message) {}
};
/// A collective or the process launcher failed.
class CommunicationError : public Error {
 public:
  explicit CommunicationError(const std::string& message) : Error(ExitCode::kCommunication, message) {}
};
/// A condition that only a defect in this project can produce.
class InternalError : public Error {
 public:
  explicit InternalError(const std::string& message) : Error(ExitCode::kInternal, message) {}
};

}  // namespace minillm
