// Memory that other processes of the same user can read, also when its owner is stopped, stuck or gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fastddp {

// Who wrote a page. A number of a process may be given to another one; together with its start it is not.
struct Process {
  int32_t pid = 0;
  uint32_t pid_namespace = 0;  // numbers of another one say nothing here
  uint64_t start = 0;          // in ticks of the kernel's clock since the machine started

  static Process current();
};

enum class Life { runs, stopped, uninterruptible, gone, unknown };
const char* to_string(Life life);
Life life_of(const Process& process);

// Note [Pages]
// A page is a file in /dev/shm, "fastddp-<user>-<pid>-<number>", readable by its user alone. It goes with its owner, and stays
// where the owner is killed, or ends while others of its job go on: then it tells what the owner did last. Pages that were left a day ago are removed by the
// next owner. Where there is no shared memory, or no room in it, a page is the owner's own memory: all works but the look
// from outside, and a warning says so.
class SharedPage {
 public:
  explicit SharedPage(size_t bytes);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  // Zeros at first.
  std::byte* data() const { return data_; }
  // Empty: nobody else can read it.
  const std::string& path() const { return path_; }
  // It outlives its owner: for those who want to know how that has ended.
  void stay();

 private:
  const size_t bytes_;
  std::string path_;
  std::byte* data_ = nullptr;
};

// A page of another process, as it was when this was made.
class PageCopy {
 public:
  // Raises c10::Error where there is none, or one that is not this user's.
  explicit PageCopy(const std::string& path);
  const std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }

 private:
  std::vector<std::byte> bytes_;
};

// Paths of this user's pages: of one process, or with 0 of all, also of those that were killed.
std::vector<std::string> shared_pages(int32_t pid = 0);
// Of this process, which ends without running what others do at their end.
void remove_own_pages();
void remove_page(const std::string& path);

}  // namespace fastddp
