// Which gradients are averaged. Tells it a listener, an optimizer that steps inside backward.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "bucket/bucket.h"
#include "bucket/buckets.h"
#include "bucket/gradient_mark.h"
#include "trip/user_code.h"
#include "window/window.h"

namespace fastddp {

class Averaged {
 public:
  using Callback = std::function<void(const std::vector<size_t>& parameters)>;

  // `lock`: callers of these functions hold it; the callback runs without it.
  Averaged(const Buckets& buckets, const Window& window, std::mutex& lock) : buckets_(buckets), window_(window), lock_(lock) {}

  // When gradients are final and averaged, calls back: inside the backward, on the stream that wrote them.
  void call(Callback callback) { callback_ = std::move(callback); }

  bool calls() const { return static_cast<bool>(callback_); }

  // The exchange has written the bucket's gradients, on the current stream.
  void bucket_finished(Bucket& bucket) const {
    // Otherwise only the end of the window tells what becomes of gradients.
    if (!callback_ || !window_.expects_all()) return;
    report(bucket.layout.parameters());
    // An optimizer that has stepped frees its gradients: other gradients shall have their memory.
    bucket.window.kept.let_go();
  }

  // All other gradients of the window are averaged. A parameter that no rank used is left out: it keeps the gradient it had,
  // which may be this rank's alone.
  void closed() const {
    if (!callback_) return;
    const auto parameters = those(buckets_.parameters().size(), [this](size_t parameter) {
      const bool is_reported_by_bucket = window_.expects_all() && !buckets_.is_sparse(parameter);
      return !is_reported_by_bucket && window_.used(parameter) != Used::no;
    });
    if (!parameters.empty()) report(parameters);
  }

  // Parameters whose gradients the last window has averaged.
  std::vector<size_t> by_last_window() const {
    if (!window_.is(WindowState::finished)) return {};
    return those(buckets_.parameters().size(),
                 [this](size_t parameter) { return window_.arrival(parameter) != Arrival::none; });
  }
  // Parameters of which a gradient that stayed on this rank is still there. Empty in a window that has begun to reduce. If
  // there are local gradients, the host waits for the device.
  std::vector<size_t> never() const {
    if (!window_.is(WindowState::accumulating) && !window_.is(WindowState::armed)) return {};
    return those(buckets_.parameters().size(), [this](size_t parameter) {
      return window_.arrival(parameter) == Arrival::local && holds_anything(buckets_.gradient(parameter));
    });
  }

 private:
  void report(const std::vector<size_t>& parameters) const {
    const auto call = callback_;
    const Unlocked unlocked(lock_);
    call(parameters);
  }

  const Buckets& buckets_;
  const Window& window_;
  std::mutex& lock_;
  Callback callback_;
};

}  // namespace fastddp
