// Layers that write gradients themselves.
#pragma once

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "bucket/buckets.h"
#include "bucket/gradient_mark.h"
#include "window/window.h"

namespace fastddp {

// Note [Layers that write gradients]
// A layer may add to a gradient itself, and give autograd nothing. Where not all gradients are expected, such a gradient is
// told from one that has not come by its tensor and version: they are not what they were before backward. A layer that adds to
// a main gradient is asked.
class Layers {
 public:
  // Returns whether the layer has added to the main gradient, and then drops what autograd was given instead.
  using Ask = std::function<bool(size_t parameter)>;

  Layers(const Buckets& buckets, const Window& window)
      : buckets_(buckets), window_(window), written_(buckets.parameters().size()) {}

  // ---- Without the reducer's lock: to ask takes Python.

  void ask_by(Ask ask) { ask_ = std::move(ask); }
  // Before autograd adds to a gradient: whether a layer has, or may have.
  bool may_have_added(size_t parameter, bool is_defined) const {
    return !is_defined || (buckets_.form().in_main_grad && ask_(parameter));
  }
  // After that. To ask for each gradient takes Python too long where no layer is expected to answer.
  bool have_added(size_t parameter, bool is_defined) const {
    return (buckets_.form().in_main_grad || !is_defined || ask_for_each_) && ask_(parameter);
  }

  // ---- With the lock.

  // What gradients are now, before a layer writes to them.
  void remember() {
    remembered_.clear();
    if (window_.expects_all()) return;
    for (size_t parameter = 0; parameter < written_.size(); ++parameter) remembered_.emplace_back(buckets_.gradient(parameter));
  }
  // Begins a window.
  void reset() {
    remembered_.clear();
    written_.assign(written_.size(), false);
  }
  // Before autograd adds to a gradient, or after backward. Returns whether a layer has written it by now.
  bool look_at(size_t parameter) {
    const auto& gradient = buckets_.gradient(parameter);
    if (remembered_.empty() || !gradient.defined()) return written_[parameter];
    return written_[parameter] = written_[parameter] || !remembered_[parameter].is_untouched(gradient);
  }
  void look_at_all() {
    for (size_t parameter = 0; parameter < remembered_.size(); ++parameter) look_at(parameter);
  }
  // A layer says that it has written the gradient.
  void note_written(size_t parameter) { written_[parameter] = true; }
  bool have_written(size_t parameter) const { return written_[parameter]; }
  // A window has ended well.
  void window_finished() { ask_for_each_ = false; }

 private:
  const Buckets& buckets_;
  const Window& window_;
  Ask ask_ = [](size_t) { return false; };
  std::atomic<bool> ask_for_each_{true};  // no window has ended yet
  std::vector<GradientMark> remembered_;  // by parameter; empty: what gradients were is not known
  std::vector<bool> written_;             // by parameter
};

}  // namespace fastddp
