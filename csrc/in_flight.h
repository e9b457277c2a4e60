// Collectives that have been started and not been waited for.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace fastddp {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// On a device with streams, and a backend that waits in streams, the current stream does the waiting.
inline void wait_for(const Works& works) {
  for (const auto& work : works) work->wait();
}

// By bucket.
class InFlight {
 public:
  void add(size_t bucket, Works works) {
    works_[bucket] = std::move(works);
  }

  bool completed(size_t bucket) const {
    return std::ranges::all_of(works_.at(bucket), [](const auto& work) { return work->isCompleted(); });
  }

  void wait(size_t bucket) {
    wait_for(works_.extract(bucket).mapped());
  }

  // For windows that failed, with an error of their own: what collectives raise is dropped.
  void drain() {
    for (const auto& [bucket, works] : works_) {
      for (const auto& work : works) {
        try {
          work->wait();
        } catch (const std::exception&) {
        }
      }
    }
    works_.clear();
  }

 private:
  std::unordered_map<size_t, Works> works_;
};

}  // namespace fastddp
