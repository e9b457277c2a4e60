// Memory that other processes of the same user can read, even when its owner is stopped, stuck or gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fastddp {

// The process that wrote a page. A pid may be given to another process later; pid and start together are unique.
struct Process {
  int32_t pid = 0;
  uint32_t pid_namespace = 0;  // pids of another namespace say nothing here
  uint64_t start = 0;          // in ticks of the kernel's clock since the machine started

  static Process current();
};

enum class Life { runs, stopped, uninterruptible, gone, unknown };
const char* to_string(Life life);
Life life_of(const Process& process);

// Note [Pages]
// A page is a file in /dev/shm, "fastddp-<user>-<pid>-<number>", readable by its user alone. It goes with its owner. It stays if
// the owner is killed, or ends while others of its job go on: then it tells what the owner did last. The next owner removes it
// an hour after somebody has found it there. If there is no shared memory, or no room in it, a page is the owner's own memory.
// Everything works then except the look from outside.
//
// Anybody can make a file of that name, of any kind, and of any size. So copy_of_page() alone opens pages: it waits for nobody,
// and reads nothing before it knows kind, owner and size.
class SharedPage {
 public:
  // Raises std::runtime_error if there is no memory at all.
  explicit SharedPage(size_t bytes);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  // Zeros at first.
  std::byte* data() const { return data_; }
  // Empty: nobody else can read it, and problem() says why.
  const std::string& path() const { return path_; }
  const std::string& problem() const { return problem_; }
  // Lets the page outlive its owner, for those who want to know how the owner ended.
  void stay();

 private:
  const size_t bytes_;
  std::string path_, problem_;
  std::byte* data_ = nullptr;
};

inline constexpr size_t kMostBytes = size_t{1} << 28;  // of a page: that of a million parameters is smaller

// A copy of another process's page, as it is now, or of its first bytes. Raises std::runtime_error if there is no page, or if it
// is another user's, no file, or larger than any page.
std::vector<std::byte> copy_of_page(const std::string& path, size_t most = kMostBytes);

// Paths of this user's pages: of one process or, with 0, of all, including those that were killed.
std::vector<std::string> shared_pages(int32_t pid = 0);
// Removes this process's pages. For a process that ends without running its exit handlers.
void remove_own_pages();
void remove_page(const std::string& path);

}  // namespace fastddp
