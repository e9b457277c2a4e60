#include "pages/shared_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>

namespace fastddp {
namespace {

constexpr auto kFolder = "/dev/shm";

std::string prefix() {
  return "fastddp-" + std::to_string(geteuid()) + "-";
}

// From /proc/<pid>/stat: the state's letter and the start; zeros if there is no such process.
struct Stat {
  char state = 0;
  uint64_t start = 0;
};

Stat stat_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  // The process's name, in parentheses, may hold anything.
  const auto end = line.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start;
  return stat;
}

uint32_t own_pid_namespace() {
  struct stat of{};
  return stat("/proc/self/ns/pid", &of) == 0 ? static_cast<uint32_t>(of.st_ino) : 0;
}

// A file that closes itself.
class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0) : descriptor_(open(path.c_str(), flags, mode)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

int pid_in(const std::string& path) {
  const auto name = std::filesystem::path(path).filename().string();
  return std::atoi(name.c_str() + prefix().size());
}

// Reserves the room: a file in memory that runs out of room later would end the process. Null: `errno` says why.
std::byte* map_shared(const std::string& path, size_t bytes) {
  const File file(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  if (!file) return nullptr;
  auto error = bytes > kMostBytes ? EFBIG : posix_fallocate(file.descriptor(), 0, static_cast<off_t>(bytes));
  if (error == 0) {
    auto* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
    if (data != MAP_FAILED) return static_cast<std::byte*>(data);
    error = errno;
  }
  remove_page(path);
  errno = error;
  return nullptr;
}

// Pages that go at exit, since Python may never destroy their owners. A forked process has the list too, but the pages are its
// parent's.
struct Pages {
  std::mutex mutex;
  std::vector<std::string> paths;
};

// Note [Never destroyed], device/cuda_driver.cpp.
Pages& own_pages() {
  static auto* const pages = [] {
    std::atexit(remove_own_pages);
    return new Pages;
  }();
  return *pages;
}

void remove_if_own(const std::string& path) {
  if (pid_in(path) == getpid()) remove_page(path);
}

// Whether it was among the pages that go at exit.
bool forget(const std::string& path) {
  auto& [mutex, paths] = own_pages();
  const std::lock_guard lock(mutex);
  return std::erase(paths, path) > 0;
}

}  // namespace

Process Process::current() {
  return {getpid(), own_pid_namespace(), stat_of("self").start};
}

const char* to_string(Life life) {
  constexpr std::array names{"runs", "stopped", "uninterruptible", "gone", "unknown"};
  return names.at(static_cast<size_t>(life));
}

Life life_of(const Process& process) {
  if (process.pid_namespace != own_pid_namespace()) return Life::unknown;
  const auto stat = stat_of(std::to_string(process.pid));
  if (stat.start != process.start) return Life::gone;
  switch (stat.state) {
    case 'Z':
    case 'X':
      return Life::gone;
    case 'T':
    case 't':
      return Life::stopped;
    case 'D':
      return Life::uninterruptible;
    default:
      return Life::runs;
  }
}

SharedPage::SharedPage(size_t bytes) : bytes_(bytes) {
  static std::atomic<size_t> pages{0};
  path_ = std::string(kFolder) + "/" + prefix() + std::to_string(getpid()) + "-" + std::to_string(pages++);
  // Usually there is no such page. If there is, its owner had the same pid and is gone.
  remove_page(path_);
  data_ = map_shared(path_, bytes_);
  if (data_ != nullptr) {
    auto& [mutex, paths] = own_pages();
    const std::lock_guard lock(mutex);
    paths.push_back(path_);
    return;
  }
  problem_ = std::strerror(errno);
  path_.clear();
  auto* const data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::runtime_error("fastddp: no memory for a page of " + std::to_string(bytes_) + " bytes: " + std::strerror(errno));
  }
  data_ = static_cast<std::byte*>(data);
}

SharedPage::~SharedPage() {
  munmap(data_, bytes_);
  if (forget(path_)) remove_if_own(path_);
}

void SharedPage::stay() {
  forget(path_);
}

std::vector<std::byte> copy_of_page(const std::string& path, size_t most) {
  const File file(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  struct stat of{};
  const bool is_there = file && fstat(file.descriptor(), &of) == 0;
  if (!is_there) throw std::runtime_error("fastddp: cannot read " + path + ": " + std::strerror(errno));
  if (of.st_uid != geteuid()) {
    throw std::runtime_error("fastddp: " + path + " is another user's, and nobody knows what is in it");
  }
  if (!S_ISREG(of.st_mode) || of.st_size > static_cast<off_t>(kMostBytes)) {
    throw std::runtime_error("fastddp: " + path +
                             " is no page of a rank: it is not a regular file, or larger than any page. Remove it");
  }
  std::vector<std::byte> bytes(std::min(most, static_cast<size_t>(of.st_size)));
  size_t done = 0;
  while (done < bytes.size()) {
    const auto count = pread(file.descriptor(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  bytes.resize(done);
  return bytes;
}

std::vector<std::string> shared_pages(int32_t pid) {
  const auto begins = pid == 0 ? prefix() : prefix() + std::to_string(pid) + "-";
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder, error)) {
    const auto name = entry.path().filename().string();
    const bool is_a_page = name.starts_with(begins) && name.find_first_not_of("0123456789-", begins.size()) == name.npos;
    if (is_a_page) found.push_back(entry.path().string());
  }
  std::ranges::sort(found);
  return found;
}

void remove_own_pages() {
  auto& [mutex, paths] = own_pages();
  const std::lock_guard lock(mutex);
  for (const auto& path : paths) remove_if_own(path);
  paths.clear();
}

void remove_page(const std::string& path) {
  unlink(path.c_str());
}

}  // namespace fastddp
