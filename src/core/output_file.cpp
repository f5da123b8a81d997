#include "core/output_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "core/format.h"

namespace minillm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporary = ".tmp-";
constexpr size_t kRandomDigits = 16;
constexpr size_t kLongestStart = 200;  // of a name, so that there is room for the rest within NAME_MAX

const char* advice(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return ". Make room on the disk, or give a path on another.";
    case EFBIG:
      return ". Raise the limit of file sizes (ulimit -f).";
    case EACCES:
    case EPERM:
    case EROFS:
      return ". Give a path that this user may write.";
    default:
      return "";
  }
}

/// N of /dev/fd/N and /proc/self/fd/N, to which /dev/stdout leads; else -1.
int own_descriptor(const fs::path& path) {
  const std::string folder = path.parent_path(), name = path.filename();
  if (folder != "/proc/self/fd" && folder != "/dev/fd") return -1;
  if (name.empty() || name.size() > 6 || name.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoi(name);
}

/// How the temporary files of `target` begin.
std::string temporary_start(const fs::path& target) {
  return target.filename().string().substr(0, kLongestStart) + std::string(kTemporary);
}

std::string random_digits() {
  std::random_device random;
  return format("%08x%08x", random(), random());
}

fs::path folder_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? "." : folder;
}

/// Makes a rename in `folder` survive a power cut. 0 or errno.
int sync_folder(const fs::path& folder) {
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) return errno == EACCES ? 0 : errno;  // a folder may be writable and not readable
  return ::fsync(opened.get()) == 0 || errno == EINVAL ? 0 : errno;
}

}  // namespace

InputError cannot_write(const std::string& path, int error_number) {
  return InputError(path + ": cannot be written: " + std::strerror(error_number) + advice(error_number));
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error)
    throw InputError(path + ": cannot be created as a folder: " + error.message() + advice(error.value()));
}

OutputTarget output_target(const std::string& path) {
  OutputTarget target{.path = path};
  struct stat status {};
  for (int links = 0; lstat(target.path.c_str(), &status) == 0 && S_ISLNK(status.st_mode); ++links) {
    target.descriptor = own_descriptor(target.path);
    if (target.descriptor >= 0) break;
    if (links == 40) throw cannot_write(path, ELOOP);
    std::error_code error;
    const fs::path next = fs::read_symlink(target.path, error);
    if (error) throw cannot_write(path, error.value());
    target.path = folder_of(target.path) / next;  // which is `next` where that is absolute
  }
  target.exists = stat(target.path.c_str(), &status) == 0;
  if (!target.exists && errno != ENOENT) throw cannot_write(path, errno);
  if (!target.exists) return target;
  if (S_ISDIR(status.st_mode)) throw cannot_write(path, EISDIR);
  target.regular = S_ISREG(status.st_mode) && target.descriptor < 0;
  if (target.descriptor < 0 && faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) != 0)
    throw cannot_write(path, errno);
  return target;
}

Descriptor open_in_place(const std::string& path, const OutputTarget& target) {
  int opened = -1;
  if (target.descriptor >= 0) {
    opened = fcntl(target.descriptor, F_DUPFD_CLOEXEC, 0);
  } else {
    do {
      opened = ::open(target.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    } while (opened < 0 && errno == EINTR);
  }
  if (opened < 0) throw cannot_write(path, errno);
  return Descriptor(opened);
}

void require_room(const std::string& path, const OutputTarget& target, int64_t bytes, int64_t present) {
  if (!target.regular) return;
  const auto more = static_cast<uint64_t>(bytes);
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      more + static_cast<uint64_t>(present) > limit.rlim_cur)
    throw InputError(path + ": cannot be written: it will have " + std::to_string(bytes + present) +
                     " bytes, and a file may have " + std::to_string(limit.rlim_cur) + advice(EFBIG));
  struct statvfs disk {};
  if (statvfs(folder_of(target.path).c_str(), &disk) != 0 || disk.f_blocks == 0)
    return;  // some file systems do not tell
  const uint64_t free = (geteuid() == 0 ? disk.f_bfree : disk.f_bavail) * disk.f_frsize;
  if (more > free)
    throw InputError(path + ": cannot be written: it takes " + std::to_string(bytes) + " bytes, and " +
                     std::to_string(free) + " are free on its disk" + advice(ENOSPC));
}

OutputFile::OutputFile(std::string path, int64_t expected_bytes)
    : path_(std::move(path)), target_(output_target(path_)) {
  if (target_.regular) {
    require_room(path_, target_, expected_bytes);
    open_temporary();
  } else {
    file_ = open_in_place(path_, target_);
  }
}

void OutputFile::open_temporary() {
  const fs::path target = target_.path;
  temporary_ = folder_of(target) / (temporary_start(target) + random_digits());
  file_ = Descriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file_) throw cannot_write(path_, errno);
  struct stat old {};
  if (!target_.exists || stat(target.c_str(), &old) != 0) return;
  (void)!fchown(file_.get(), old.st_uid, old.st_gid);
  (void)!fchmod(file_.get(), old.st_mode & 0777);
}

OutputFile::~OutputFile() {
  if (file_ && !temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::write(std::string_view text) {
  if (!file_) throw InternalError(path_ + ": written to after it was finished");
  if (const int error = write_all(file_.get(), text)) throw cannot_write(path_, error);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  write(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

void OutputFile::finish() {
  if (!file_) throw InternalError(path_ + ": finished twice");
  int error = 0;
  if (!temporary_.empty() && ::fsync(file_.get()) != 0) error = errno;
  const int closing = file_.close();
  if (error == 0) error = closing;
  if (temporary_.empty()) {
    if (error != 0) throw cannot_write(path_, error);
    return;
  }
  if (error == 0 && std::rename(temporary_.c_str(), target_.path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary_.c_str());
    throw cannot_write(path_, error);
  }
  if ((error = sync_folder(folder_of(target_.path))) != 0)
    throw InputError(path_ + ": is written, but may not survive a power cut, its folder cannot be flushed: " +
                     std::strerror(error));
}

void require_writable(const std::string& path, int64_t bytes) {
  if (output_target(path).regular) const OutputFile probe(path, bytes);
}

void remove_leftovers(const std::string& path) {
  const fs::path target = output_target(path).path;
  const std::string start = temporary_start(target);
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_of(target), error)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(start) || name.size() != start.size() + kRandomDigits) continue;
    if (name.find_first_not_of("0123456789abcdef", start.size()) != std::string::npos) continue;
    std::error_code ignored;
    fs::remove(entry.path(), ignored);
  }
}

}  // namespace minillm
