// A rank's Python stack, which one thread asks for and another one gives.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "watch/record.h"

namespace fastddp {

class WantedStack {
 public:
  void want() {
    const std::lock_guard lock(mutex_);
    is_wanted_ = true;
  }
  bool is_wanted() const {
    const std::lock_guard lock(mutex_);
    return is_wanted_;
  }
  void give(std::vector<std::string> lines) {
    const std::lock_guard lock(mutex_);
    is_wanted_ = false;
    at_ = ms_since_1970();
    if (lines == lines_) return;
    lines_ = std::move(lines);
    is_new_ = true;
  }
  // Whether it has changed since the last call.
  bool takes_new() {
    const std::lock_guard lock(mutex_);
    return std::exchange(is_new_, false);
  }
  // Its lines, and when they were given, in ms since 1970.
  std::pair<std::vector<std::string>, int64_t> last() const {
    const std::lock_guard lock(mutex_);
    return {lines_, at_};
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    lines_.clear();
  }

 private:
  mutable std::mutex mutex_;
  bool is_wanted_ = false;
  bool is_new_ = false;
  int64_t at_ = 0;
  std::vector<std::string> lines_;
};

}  // namespace fastddp
