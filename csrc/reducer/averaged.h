// Tells a listener, an optimizer that steps inside backward, which gradients are averaged.
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

  // `lock`: callers of these functions hold it; the callback runs without it.
  Averaged(const Window& window, std::mutex& lock) : window_(window), lock_(lock) {}

  void set(Callback callback) { callback_ = std::move(callback); }

  // The exchange has written the bucket's gradients, on the current stream.
  void bucket_finished(Bucket& bucket) const {
    // Otherwise only the end of the window tells what becomes of gradients.
    if (!callback_ || !window_.expects_all()) return;
    report(bucket.layout.parameters());
    // An optimizer that has stepped frees its gradients: other gradients shall have their memory.
    bucket.window.kept.let_go();
  }

  void closed(const Closing& closing) const {
    if (!callback_) return;
    if (const auto averaged = closing.averaged_after_buckets(); !averaged.empty()) report(averaged);
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
