// The pauses of a thread that looks now and then.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace fastddp {

class Pauses {
 public:
  // Returns whether the thread goes on.
  bool pause(double seconds) {
    std::unique_lock lock(mutex_);
    return !ends_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return is_over_; });
  }
  // Ends all pauses, from another thread.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    ends_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ends_;
  bool is_over_ = false;
};

}  // namespace fastddp
