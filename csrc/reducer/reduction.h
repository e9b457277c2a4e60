// A backward that synchronises: takes its gradients to the ticks of their buckets.
#pragma once

#include <mutex>
#include <vector>

#include "bucket/buckets.h"
#include "observe/timeline.h"
#include "reducer/layers.h"
#include "reducer/other_reducers.h"
#include "reducer/shared_sums.h"
#include "transport/weighting.h"
#include "trip/driver.h"
#include "window/window.h"

namespace fastddp {

// Whether this window has brought a gradient that is still there: zero_grad may have removed it.
inline bool came(const Window& window, const Buckets& buckets, size_t parameter) {
  return window.arrival(parameter) != Arrival::none && buckets.gradient(parameter).defined();
}

// Note [Gradients left in place]
// A packed gradient may move into its wire, where it is only this rank's share of the mean, and may be averaged before backward
// ends. Two kinds of backward leave gradients where they are, and write averages when backward has ended. In one of them another
// reducer reads the gradients too (note [Shared parameters], other_reducers.h). The other is for a choice of parameters
// (`backward(inputs=…)`): it may leave the window incomplete, and then the caller finds gradients as autograd made them.
//
// All functions are called with the reducer's lock held, except begin_sum().
class Reduction {
 public:
  Reduction(Reducer& reducer, Buckets& buckets, Window& window, Driver& driver, Timeline& timeline, std::mutex& lock);

  Layers& layers() { return layers_; }
  SharedSums& shared_sums() { return shared_sums_; }
  // This thread conducts for as long as the result lives.
  [[nodiscard]] Conductor::Turn conduct() { return {conductor_, lock_}; }
  bool is_conducted() const { return conductor_.is_busy(); }

  // Before something is added to a gradient that is a sum over ranks: note [What a sum holds already], shared_sums.h.
  void begin_sum(size_t parameter, bool is_defined) {
    if (!shared_sums_.are_there()) return;
    const bool by_layer = layers_.may_have_added(parameter, is_defined);
    const std::lock_guard lock(lock_);
    shared_sums_.zero(parameter, by_layer);
  }

  // The window reduces from now on; `goes_on`: after a backward that left gradients out.
  void begin(bool goes_on);
  // Backward has ended: takes what layers have written to gradients that autograd knows nothing of.
  void take_unseen();

  // Autograd has accumulated `incoming`, if it is defined; see GradHooks.
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);

  // The parameters that the window waits for and that have no gradient, not even a local one.
  std::vector<size_t> missing() const {
    return those(buckets_.parameters().size(), [this](size_t parameter) {
      const bool is_local = window_.arrival(parameter) == Arrival::local && came(window_, buckets_, parameter);
      return window_.is_missing(parameter) && !is_local;
    });
  }

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
  std::string left_out() const;
  void complete(Bucket& bucket, size_t member, bool exclusive);
  void start_complete_buckets();

  const Reducer& reducer_;
  Buckets& buckets_;
  Window& window_;
  Driver& driver_;
  Timeline& timeline_;
  std::mutex& lock_;
  Conductor conductor_;
  SharedSums shared_sums_;
  Layers layers_;
  const OtherReducers others_;
  bool shares_order_ = false;
  bool goes_on_ = false;
  bool starts_at_end_ = false;  // this window's buckets start when backward has ended
};

}  // namespace fastddp
