// Collectives that have been started and not been waited for.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fastddp {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// How long this thread has waited for collectives, all in all.
inline thread_local std::chrono::steady_clock::duration waited_for_collectives{};

template <typename Function>
void count_wait(const Function& wait) {
  const auto begin = std::chrono::steady_clock::now();
  wait();
  waited_for_collectives += std::chrono::steady_clock::now() - begin;
}

// On a device with streams, and a backend that waits in streams, the current stream does the waiting.
inline void wait_for(const Works& works) {
  count_wait([&] {
    for (const auto& work : works) work->wait();
  });
}

// Null where the process group has none: c10d tells so by an exception.
inline c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Calls back, from any thread, when all are done; at once, where there are none; never, where one of them does not tell.
inline void when_done(const Works& works, const std::function<void()>& call) {
  if (works.empty()) return call();
  const auto left = std::make_shared<std::atomic<size_t>>(works.size());
  for (const auto& work : works) {
    const auto future = future_of(*work);
    if (!future) return;
    future->addCallback([left, call](c10::ivalue::Future&) {
      if (--*left == 0) call();
    });
  }
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

  const Works& of(size_t bucket) const {
    return works_.at(bucket);
  }

  // For works that the host waits for.
  bool complete_within(size_t bucket, std::chrono::milliseconds time) const {
    for (const auto& work : works_.at(bucket)) {
      try {
        if (!work->isCompleted()) work->wait(time);
      } catch (const std::exception&) {  // the time is over, or the collective has failed: wait() will tell
      }
    }
    return completed(bucket);
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
