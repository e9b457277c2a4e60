// A backward that synchronises: from its gradients to the ticks of their buckets.
#pragma once

#include <mutex>
#include <vector>

#include "bucket/buckets.h"
#include "pipeline/user_code.h"
#include "reducer/observer.h"
#include "reducer/other_reducers.h"
#include "reducer/shared_sums.h"
#include "reducer/ticks.h"
#include "window/window.h"

namespace fastddp {

// Whether a parameter has brought something in this window that is still there: zero_grad may have removed it.
bool came(const Window& window, const Buckets& buckets, size_t parameter);

// Note [Gradients left in place]
// A gradient that is packed may move into its wire, where it is this rank's share of the mean, and may be averaged before backward
// ends. Two kinds of backward leave gradients where they are instead, and write averages when backward has ended: one in which
// another reducer reads them too (note [Shared parameters], other_reducers.h), and one for a choice of parameters
// (`backward(inputs=…)`), which may leave a window incomplete whose gradients the caller then finds as autograd made them.
//
// All functions are called with the lock of the reducer held.
class Reduction {
 public:
  Reduction(const Reducer& reducer, Buckets& buckets, Window& window, Ticks& ticks, Observer& observer,
            Conductor& conductor, const SharedSums& shared_sums, std::mutex& lock);

  // The window is one that reduces, from now on.
  void begin();

  // Autograd has accumulated `incoming`; GradHooks.
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);

  // Parameters that the window waits for and that have no gradient, not even a local one.
  std::vector<size_t> missing() const;

  // Backward has ended, and nothing is missing: what came under no_sync counts.
  void synchronise_local_gradients();
  // Backward has ended, and its window with it: what has come is sent, a placeholder travels for what has not.
  void complete_all_buckets();

  // The backward of the model has collectives of its own over the same ranks: note [Order among collectives].
  void share_order() { shares_order_ = true; }

 private:
  // counts(parameter): whether this rank counts what the gradient holds.
  auto counts() const {
    return [this](size_t parameter) { return !shared_sums_.counts_elsewhere(parameter); };
  }
  void check_expected(size_t parameter, Window::Hook hook) const;
  void complete(size_t parameter, bool exclusive);
  void start_complete_buckets();

  const Reducer& reducer_;
  Buckets& buckets_;
  Window& window_;
  Ticks& ticks_;
  Observer& observer_;
  Conductor& conductor_;
  const SharedSums& shared_sums_;
  std::mutex& lock_;
  const OtherReducers others_;
  bool shares_order_ = false;
  bool starts_at_end_ = false;  // of this window: its buckets start when backward has ended
};

}  // namespace fastddp
