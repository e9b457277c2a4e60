// What ranks exchange behind the buckets of a window: its status, sparse gradients, late ones.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <string>
#include <vector>

#include "bucket/buckets.h"
#include "pipeline/exchange.h"
#include "reducer/local_gradients.h"
#include "reducer/shared_sums.h"
#include "window/status.h"
#include "window/window.h"

namespace fastddp {

// Note [Late gradients]
// When a backward ends its window, ranks exchange which parameters they used. A gradient nobody has is left alone. One that
// came to some rank behind its bucket is completed: what the bucket lacked is averaged in one more exchange, of these
// parameters only, which all ranks know of from that map, and added.

// Note [Whose usage counts]
// What becomes of a gradient depends on whether the ranks with which this one averages used its parameter. Other ranks' use
// says nothing about it, and what they have late travels in collectives of their own. So who used what, and whose window failed,
// is told among the ranks of the exchange. But a static graph's first step decides which parameters buckets hold, and these have
// to be the same on all ranks of the model, for the exchanges of later windows go over others than the first's. While that is
// learned, what any rank of the model uses counts as used. Where ranks share nothing, each has its own use.

// Every function is a step of one window, in this order; abandon() does what is left of them.
class Closing {
 public:
  // `group`: the model's.
  Closing(Buckets& buckets, Window& window, c10d::ProcessGroup& group, const SharedSums& shared_sums);

  // As Reducer::is_model().
  void is_model(size_t number) { model_ = number; }

  // Begins a window.
  void reset();

  // Before anything is told to others: whether sparse parameters have sparse gradients.
  void check_sparse_gradients() const;
  // `lost_a_backward`: maybe; note [Status of a window], window/status.h. `local`: where gradients are measured.
  void send_status(const Exchange& exchange, bool lost_a_backward, const LocalGradients* local);
  // What has failed on another rank; and if nothing has, what is used from now on. On a device with streams the host waits only
  // if it needs the answer to go on: else it comes later.
  std::optional<std::string> receive_status(const Exchange& exchange);
  std::optional<WindowStatus::Failure> take_late_failure() { return status_.take_late_failure(); }
  std::optional<size_t> take_late_not_finite() { return status_.take_late_not_finite(); }
  // Whether a rank's gradients are not finite, as its status has said: none, where the host does not know it yet, or no status
  // was exchanged.
  std::optional<bool> some_are_not_finite() const;
  void exchange_sparse_gradients(const Exchange& exchange);
  void exchange_late_gradients(Exchange& exchange);
  // What has been averaged, and was not known to be when its bucket was finished.
  std::vector<size_t> averaged_behind_buckets() const;

  // Takes part in what is left, with nothing of this rank's: of a window that `failed`, so that no rank takes what it gets for
  // a gradient; or of one that others have. Whether the window is well on the other ranks.
  bool abandon(Exchange& exchange, bool failed, bool lost_a_backward);

 private:
  c10d::ProcessGroup* status_group(const Exchange& exchange) const;
  bool exchanges_status(const Exchange& exchange) const;
  void send_status(const Exchange& exchange, size_t window, bool failed, bool lost_a_backward,
                   const LocalGradients* local);
  void host_waits_for_status();
  std::vector<Used> used_here() const;
  at::Tensor sparse_gradient(size_t parameter) const;
  void sum_over_ranks(const Exchange& exchange, std::vector<at::Tensor>& sparse_gradients, bool is_void);
  std::vector<Bucket> late_buckets() const;
  void average_late(Bucket& late, Exchange& exchange);
  void resolve_placeholders(Exchange& exchange);
  void discard_unused(Exchange& exchange) const;

  Buckets& buckets_;
  Window& window_;
  c10d::ProcessGroup& group_;
  const SharedSums& shared_sums_;
  size_t model_ = 0;

  // How far this window is.
  enum class Done { nothing, status, sparse_gradients } done_ = Done::nothing;
  size_t late_started_ = 0;
  WindowStatus status_;
  bool status_is_read_ = false;
};

}  // namespace fastddp
