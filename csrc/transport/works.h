// Collectives that have been started and not been waited for.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/cuda_driver.h"
#include "device/streams.h"
#include "transport/interruption.h"

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
    for (const auto& work : works) Interruption::wait(*work);
  });
}

// Note [Python objects of a thread]
// A collective keeps the thread's state of when it was started, and in backward torch has put an object of Python's there.
// The backend's thread is the last to let go of it, needs the GIL to do so, and aborts a process whose interpreter ends at
// that moment. So what is started here is started while this lives, without such objects. Not the hooks of users.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : objects_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(objects_)); }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects objects_;
};

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

inline bool are_done(const Works& works) {
  return std::ranges::all_of(works, [](const auto& work) { return work->isCompleted(); });
}

// Waits for those of a window that failed, with an error of its own, and forgets them: what they raise is dropped.
inline void drain(Works& works) {
  for (const auto& work : works) {
    try {
      Interruption::wait(*work);
    } catch (const std::exception&) {
    }
  }
  works.clear();
}

// Note [Who waits]
// Work::wait keeps either the calling thread waiting until the collective is done (gloo; NCCL with TORCH_NCCL_BLOCKING_WAIT),
// or only the current stream (NCCL otherwise). c10d has no question for it, and a backend's name is no answer. But it shows:
// where wait() has returned and the collective is not done, it is the stream that waits. Until this has been seen, a bucket
// has arrived when its collective is done, and at the end of backward it is waited for: unpack comes later than it could, and
// nothing worse. Ranks may see it at different times, since the order of collectives does not depend on it.
// While a graph is captured nobody may ask whether a collective is done. A thread that waits could not capture one.
class WhoWaits {
 public:
  // Whether waiting for a collective on this device would not keep the calling thread.
  bool is_the_stream(c10::Device device) const { return has_streams(device) && (seen_ || is_capturing(device)); }

  void wait_for(const Works& works, c10::Device device) {
    fastddp::wait_for(works);
    if (is_the_stream(device) || !has_streams(device)) return;
    seen_ = !are_done(works);
  }

 private:
  bool seen_ = false;
};

}  // namespace fastddp
