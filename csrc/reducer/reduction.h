// A backward that synchronises: takes its gradients to the ticks of their buckets.
#pragma once

#include <mutex>
#include <vector>

#include "bucket/buckets.h"
#include "pipeline/user_code.h"
#include "reducer/other_reducers.h"
#include "reducer/shared_sums.h"
#include "reducer/ticks.h"
#include "reducer/timeline.h"
#include "window/window.h"

namespace fastddp {

// Whether this window has brought a gradient that is still there: zero_grad may have removed it.
bool came(const Window& window, const Buckets& buckets, size_t parameter);

// Note [Gradients left in place]
// A packed gradient may move into its wire, where it is only this rank's share of the mean, and may be averaged before backward
// ends. Two kinds of backward leave gradients where they are, and write averages when backward has ended. In one of them another
// reducer reads the gradients too (note [Shared parameters], other_reducers.h). The other is for a choice of parameters
// (`backward(inputs=…)`): it may leave the window incomplete, and then the caller finds gradients as autograd made them.
//
// All functions are called with the reducer's lock held.
class Reduction {
 public:
  Reduction(const Reducer& reducer, Buckets& buckets, Window& window, Ticks& ticks, Timeline& timeline, Conductor& conductor,
            const SharedSums& shared_sums, std::mutex& lock);

  // The window reduces from now on.
  void begin();

  // Note [Layers that write gradients]
  // A layer may add to a gradient itself, and give autograd nothing. Where not all gradients are expected, such a gradient is
  // told from one that has not come by its tensor and version: they are not what they were before backward.
  void remember_gradients();
  void forget_gradients() {
    remembered_.clear();
    written_.assign(written_.size(), false);
  }
  // Before autograd adds to a gradient: a layer may have written it by now.
  void look_at(size_t parameter) {
    const auto& gradient = buckets_.gradient(parameter);
    if (remembered_.empty() || !gradient.defined()) return;
    written_[parameter] = written_[parameter] || !remembered_[parameter].is_untouched(gradient);
  }
  // A layer says that it has written the gradient.
  void note_written(size_t parameter) { written_[parameter] = true; }
  // Backward has ended: takes what layers have written to gradients that autograd knows nothing of.
  void take_unseen();

  // Autograd has accumulated `incoming`, if it is defined; see GradHooks.
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);

  // The parameters that the window waits for and that have no gradient, not even a local one.
  std::vector<size_t> missing() const;

  // Backward has ended, and nothing is missing: gradients that came under no_sync are averaged as they are.
  void synchronise_local_gradients();
  // Backward has ended, and its window with it: gradients that have come are sent, with placeholders for the others.
  void complete_all_buckets();

  // The model's backward has collectives of its own over the same ranks: note [Order among collectives].
  void share_order() { shares_order_ = true; }

 private:
  // counts(parameter): whether this rank counts what the gradient holds; note [What a sum holds already], shared_sums.h.
  auto counts() const {
    return [this](size_t parameter) { return !shared_sums_.counts_elsewhere(parameter); };
  }
  void forget_removed();
  void check_expected(size_t parameter, Window::Hook hook) const;
  void complete(size_t parameter, bool exclusive);
  void start_complete_buckets();

  const Reducer& reducer_;
  Buckets& buckets_;
  Window& window_;
  Ticks& ticks_;
  Timeline& timeline_;
  Conductor& conductor_;
  const SharedSums& shared_sums_;
  std::mutex& lock_;
  const OtherReducers others_;
  std::vector<GradientMark> remembered_;  // by parameter; empty: what gradients were is not known
  std::vector<bool> written_;             // by parameter
  bool shares_order_ = false;
  bool starts_at_end_ = false;  // this window's buckets start when backward has ended
};

}  // namespace fastddp
