// Tells a listener which gradients are averaged: an optimizer that steps inside backward.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "pipeline/user_code.h"
#include "reducer/closing.h"
#include "window/window.h"

namespace fastddp {

class Averaged {
 public:
  using Callback = std::function<void(const std::vector<size_t>& parameters)>;

  // `lock`: held by who calls these functions, and not by the callback.
  Averaged(const Window& window, std::mutex& lock) : window_(window), lock_(lock) {}

  void set(Callback callback) { callback_ = std::move(callback); }

  // Its gradients are what the exchange makes of them; called on the stream on which it wrote them.
  void bucket_finished(Bucket& bucket) const {
    // Otherwise it is only known at the end of the window what becomes of gradients.
    if (!callback_ || !window_.expects_all()) return;
    report(bucket.layout.parameters());
    // An optimizer that has stepped frees its gradients, and others are to have their memory.
    bucket.window.kept.let_go();
  }

  void closed(const Closing& closing) const {
    if (!callback_) return;
    if (const auto averaged = closing.averaged_behind_buckets(); !averaged.empty()) report(averaged);
  }

 private:
  void report(const std::vector<size_t>& parameters) const {
    const auto call = callback_;
    const Unlocked unlocked(lock_);
    call(parameters);
  }

  const Window& window_;
  std::mutex& lock_;
  Callback callback_;
};

}  // namespace fastddp
