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
  auto error = posix_fallocate(file.descriptor(), 0, static_cast<off_t>(bytes));
  if (error == 0) {
    auto* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
    if (data != MAP_FAILED) return static_cast<std::byte*>(data);
    error = errno;
  }
  remove_page(path);
  errno = error;
  return nullptr;
}

std::byte* map_private(size_t bytes) {
  auto* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::runtime_error("fastddp: no memory for a page of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
  }
  return static_cast<std::byte*>(data);
}

// Removes pages at exit, since Python may never destroy their owners.
class Pages {
 public:
  static Pages& of_this_process() {
    static auto& pages = *make();
    return pages;
  }

  void add(const std::string& path) {
    const std::lock_guard lock(mutex_);
    paths_.push_back(path);
  }

  // A forked process has the list too, but the pages are its parent's.
  void remove(const std::string& path) {
    const std::lock_guard lock(mutex_);
    if (std::erase(paths_, path) > 0 && pid_in(path) == getpid()) remove_page(path);
  }

  void remove_all() {
    const std::lock_guard lock(mutex_);
    for (const auto& path : paths_) {
      if (pid_in(path) == getpid()) remove_page(path);
    }
    paths_.clear();
  }

  void leave(const std::string& path) {
    const std::lock_guard lock(mutex_);
    std::erase(paths_, path);
  }

 private:
  // Note [Never destroyed], device/cuda_driver.cpp.
  static Pages* make() {
    std::atexit([] { of_this_process().remove_all(); });
    return new Pages;
  }

  std::mutex mutex_;
  std::vector<std::string> paths_;
};

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
    Pages::of_this_process().add(path_);
    return;
  }
  problem_ = std::strerror(errno);
  path_.clear();
  data_ = map_private(bytes_);
}

SharedPage::~SharedPage() {
  munmap(data_, bytes_);
  if (!path_.empty()) Pages::of_this_process().remove(path_);
}

void SharedPage::stay() {
  if (!path_.empty()) Pages::of_this_process().leave(path_);
}

PageCopy::PageCopy(const std::string& path) {
  const File file(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  struct stat of{};
  const bool is_there = file && fstat(file.descriptor(), &of) == 0;
  if (!is_there) throw std::runtime_error("fastddp: cannot read " + path + ": " + std::strerror(errno));
  if (of.st_uid != geteuid()) {
    throw std::runtime_error("fastddp: " + path + " is another user's, and nobody knows what is in it");
  }
  bytes_.resize(static_cast<size_t>(of.st_size));
  size_t done = 0;
  while (done < bytes_.size()) {
    const auto count = pread(file.descriptor(), bytes_.data() + done, bytes_.size() - done, static_cast<off_t>(done));
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  bytes_.resize(done);
}

std::vector<std::string> shared_pages(int32_t pid) {
  const auto begins = pid == 0 ? prefix() : prefix() + std::to_string(pid) + "-";
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder, error)) {
    if (entry.path().filename().string().starts_with(begins)) found.push_back(entry.path().string());
  }
  std::ranges::sort(found);
  return found;
}

bool has_process(const std::string& path) {
  return stat_of(std::to_string(pid_in(path))).state != 0;
}

bool left_for(const std::string& path, std::chrono::seconds time) {
  using namespace std::filesystem;
  std::error_code error;
  const auto seen_before = (status(path, error).permissions() & perms::owner_write) == perms::none;
  if (!error && !seen_before) {
    permissions(path, perms::owner_read, error);
    last_write_time(path, file_time_type::clock::now(), error);
  }
  const auto seen = last_write_time(path, error);
  return !error && seen_before && file_time_type::clock::now() - seen > time;
}

void remove_own_pages() {
  Pages::of_this_process().remove_all();
}

void remove_page(const std::string& path) {
  unlink(path.c_str());
}

}  // namespace fastddp
