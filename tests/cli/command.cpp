#include "command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

using Clock = std::chrono::steady_clock;

/// Starts `command` as the leader of a process group, so that it can be ended with its children. Its output
/// goes to files, because a pipe that nobody reads stops the program.
pid_t start(const std::vector<std::string>& command, const TemporaryFolder& folder) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, folder.path("out").c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, folder.path("err").c_str(), kFlags, 0600);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);

  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t process = 0;
  const int error = posix_spawn(&process, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) throw std::system_error(error, std::generic_category(), command.front());
  return process;
}

/// True when the process ended before `patience` was over; `status` is then waitpid()'s.
bool wait_for(pid_t process, int& status, std::chrono::seconds patience) {
  const Clock::time_point end = Clock::now() + patience;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace

Result run(const std::vector<std::string>& command, std::chrono::seconds patience) {
  const TemporaryFolder folder;
  const pid_t process = start(command, folder);
  Result result;
  int status = 0;
  if (!wait_for(process, status, patience)) {
    result.timed_out = true;
    kill(-process, SIGTERM);  // mpirun passes it on to its ranks
    if (!wait_for(process, status, std::chrono::seconds(10))) {
      kill(-process, SIGKILL);
      waitpid(process, &status, 0);
    }
  }
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.out = folder.read("out");
  result.err = folder.read("err");
  return result;
}

Result minillm(const std::vector<std::string>& arguments) {
  std::vector<std::string> command{MINILLM_PROGRAM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run(command);
}

Result minillm_on(int ranks, const std::vector<std::string>& arguments) {
  if (ranks == 1) return minillm(arguments);
  std::vector<std::string> command{MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", std::to_string(ranks),
                                   MINILLM_PROGRAM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run(command);
}

void expect_failed(const Result& result, ExitCode code, std::initializer_list<std::string> parts) {
  EXPECT_EQ(result.exit_code, static_cast<int>(code)) << result;
  EXPECT_FALSE(result.timed_out) << result;
  for (const std::string& part : parts) EXPECT_GT(count(result.err, part), 0) << part << "\n" << result;
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

std::ostream& operator<<(std::ostream& stream, const Result& result) {
  return stream << "exit code " << result.exit_code << (result.timed_out ? " (timed out)" : "")
                << "\n--- stdout\n"
                << result.out << "--- stderr\n"
                << result.err;
}

}  // namespace minillm::test
