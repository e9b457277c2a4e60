// What ranks exchange after the buckets of a window: its status, sparse gradients, late gradients.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <vector>

#include "bucket/buckets.h"
#include "device/cuda_driver.h"
#include "reducer/failure.h"
#include "reducer/local_gradients.h"
#include "reducer/shared_sums.h"
#include "trip/driver.h"
#include "window/status.h"
#include "window/window.h"

namespace fastddp {

// Note [Late gradients]
// When a backward ends its window, ranks tell each other in the status which parameters they used. A gradient that no rank has
// is left alone. Where a bucket did not wait for a gradient that came to some rank, ranks average what the bucket lacked in one
// more exchange, of these parameters only, and add it. All ranks know these parameters from the status.

// Note [Whose usage counts]
// What becomes of a gradient depends only on the use of its parameter by the ranks that average it: other ranks' late gradients
// travel in collectives of their own. So the status goes over the ranks of the driver. The first step of a static graph is
// an exception: it decides which parameters buckets hold. Buckets have to be the same on all ranks of the model, since exchanges
// of later windows may go over other ranks. So while a static graph is learned, the status goes over all ranks of the model,
// and the use by any of them counts. Where an exchange shares nothing, each rank has its own use.

// The functions are the steps of one window, in this order. abandon() does those that are left.
class Closing {
 public:
  // `group`: the model's.
  Closing(Buckets& buckets, Window& window, c10d::ProcessGroup& group, const SharedSums& shared_sums);

  // As Reducer::set_model_number().
  void set_model_number(size_t number) { model_ = number; }

  // Begins a window.
  void reset();

  // Raises if a sparse parameter has a dense gradient: before this rank tells others that its window is well.
  void check_sparse_gradients() const;
  // Whether the status of this window travels with its last bucket: note [Room for the status], trip/driver.h.
  bool status_rides(const Driver& driver) const {
    return driver.status_tick() && exchanges_status(driver) && !window_.ends_with_backward();
  }
  // What this rank says in its status, as far as this object cannot know it. `local`: null unless gradients are measured.
  void say(const WindowStatus::Said& said, const LocalGradients* local = nullptr) {
    said_ = said;
    local_ = local;
  }
  void write_status(const Driver& driver, const at::Tensor& room) {
    status_rides(driver) ? status_.write(*driver.way()->all, room, said()) : void(room.zero_());
  }
  // Unless it rides.
  void send_status(const Driver& driver);
  // Whether no other rank has failed. If none has, learns which parameters are used. On a device with streams the host waits
  // only if it needs the status to go on; otherwise the status arrives later.
  bool receive_status(Driver& driver);
  // Whether an earlier window has failed on another rank, as its status says that has arrived by now.
  bool has_failed_late() {
    const auto late = status_.take_late_failure();
    if (late) failure_.found_later(late->what, late->window);
    return late.has_value();
  }
  // What both have found, or has happened here.
  Failure& failure() { return failure_; }
  std::optional<size_t> take_late_not_finite() { return status_.take_late_not_finite(); }
  // Whether a rank has said in its status that its gradients are not finite. None: the host does not know it yet, or no status
  // was exchanged.
  std::optional<bool> some_are_not_finite() const { return heard_ ? std::optional(heard_->not_finite) : std::nullopt; }
  void exchange_sparse_gradients(const Driver& driver);
  void exchange_late_gradients(Driver& driver);

  // Takes part in what is left of a window, without gradients of this rank. If the window failed here it sends NaN, so that no
  // rank takes the result for a gradient. If not, only others have the window. Returns whether it is well on the other ranks.
  bool abandon(Driver& driver);

 private:
  // Note [Whose usage counts]
  c10d::ProcessGroup* status_group(const Driver& driver) const {
    auto* const group = driver.way()->all.get();
    const bool decides_over_buckets = window_.is_learning() && window_.learns_once();
    return group != nullptr && decides_over_buckets ? &group_ : group;
  }
  // A captured step has no status: its graph is replayed without the host, which could not read one.
  bool exchanges_status(const Driver& driver) const {
    const auto* const group = status_group(driver);
    return group != nullptr && group->getSize() > 1 && !is_capturing(buckets_.device());
  }
  WindowStatus::Said said() const;
  void host_waits_for_status(Driver& driver);
  void take_status_that_rode(Driver& driver) {
    if (!status_rides(driver)) return;
    const auto [sums, factor] = driver.take_status();
    status_.came(sums, factor);
  }
  std::vector<Used> used_here() const;
  at::Tensor sparse_gradient(size_t parameter) const;
  void sum_over_ranks(const Driver& driver, std::vector<at::Tensor>& sparse_gradients, bool is_void);
  std::vector<Bucket> late_buckets() const;
  void average_late(Bucket& late, Driver& driver) {
    const auto wait = driver.start_late(late);
    ++late_started_;  // even if the wait raises
    wait();
  }
  void resolve_placeholders(Driver& driver);
  void discard_unused(Driver& driver) const;

  Buckets& buckets_;
  Window& window_;
  c10d::ProcessGroup& group_;
  const SharedSums& shared_sums_;
  Failure failure_;
  size_t model_ = 0;

  // The last step that this window has done.
  enum class Done { nothing, status, sparse_gradients } done_ = Done::nothing;
  size_t late_started_ = 0;
  WindowStatus::Said said_;
  const LocalGradients* local_ = nullptr;
  WindowStatus status_;
  std::optional<WindowStatus::Heard> heard_;  // none: the host has not waited for this window's status
};

}  // namespace fastddp
