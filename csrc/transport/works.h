// Works: collectives that have started and have not been waited for.
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
#include "observe/progress.h"
#include "waits/interruption.h"

namespace fastddp {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

template <typename Function>
void count_wait(const Function& wait) {
  const auto begin = std::chrono::steady_clock::now();
  wait();
  waited_for_collectives += std::chrono::steady_clock::now() - begin;
}

// On a device with streams, with a backend that waits in streams, only the current stream waits.
inline void wait_for(const Works& works) {
  count_wait([&] {
    for (const auto& work : works) Interruption::wait(*work);
  });
}

// Note [Python objects of a thread]
// A collective keeps the thread's state of the moment when it started. In backward, torch has put a Python object into that
// state. The backend's thread releases it last. For that it needs the GIL, and aborts the process if the interpreter ends at
// that moment. So we start collectives while this guard lives, without such objects. Users' hooks run without the guard.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : objects_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(objects_)); }
  C10_DISABLE_COPY_AND_ASSIGN(WithoutPythonObjects);

 private:
  at::impl::ThreadLocalPythonObjects objects_;
};

// Calls `call`, from any thread, when all works are done: at once if there are none, never if one of them has no future.
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

// Waits for the works of a window that failed and forgets them. Drops their errors, since the window has its own.
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
// Work::wait blocks either the calling thread until the collective is done (gloo; NCCL with TORCH_NCCL_BLOCKING_WAIT), or only
// the current stream (NCCL otherwise). c10d cannot tell which, and a backend's name does not tell. But we can see it: if wait()
// has returned and the collective is not done, the stream waits. Until we have seen this, a bucket counts as arrived when its
// collective is done, and at the end of backward it is waited for. The only cost is that unpack comes later than it could.
// Ranks may see it at different times, since the order of collectives does not depend on it. While a graph is captured nobody
// may ask whether a collective is done. Then the stream waits, since a thread that waits could not capture a graph.
class WhoWaits {
 public:
  // Whether a wait for a collective on this device blocks only the current stream.
  bool is_the_stream(c10::Device device) const { return has_streams(device) && (seen_ || is_capturing(device)); }

  // Forgets the works, since gloo's messages cannot be waited for again. `sent`: what they send, if there are any.
  void wait_for(Works& works, const at::Tensor& sent) {
    const auto awaited = std::exchange(works, {});
    if (awaited.empty()) return;
    fastddp::wait_for(awaited);
    if (is_the_stream(sent.device()) || !has_streams(sent.device())) return;
    seen_ = !are_done(awaited);
  }

 private:
  bool seen_ = false;
};

}  // namespace fastddp
