// The ticks of a window, and the finishing of its buckets: note [Ticks], pipeline/exchange.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "bucket/buckets.h"
#include "pipeline/exchange.h"
#include "reducer/timeline.h"
#include "window/window.h"

namespace fastddp {

// Calls the exchange in the order of the plan, and finishes buckets as soon as they have arrived.
class Ticks {
 public:
  // `on_finished`: called when the exchange has written the gradients of a bucket, on the stream on which it did.
  Ticks(Buckets& buckets, Timeline& timeline, std::shared_ptr<Exchange> exchange,
        std::function<void(Bucket& bucket)> on_finished);

  Exchange& exchange() const { return *exchange_; }
  const std::shared_ptr<Exchange>& shared_exchange() const { return exchange_; }
  void set_exchange(std::shared_ptr<Exchange> exchange) { exchange_ = std::move(exchange); }
  // Begins a window.
  void reset() {
    ticks_ = finished_ = 0;
    waits_.reset();
  }

  // The bucket whose exchange begins next; the number of buckets, or more: none.
  size_t next() const { return ticks_; }
  void tick();
  void tick_to_the_end() {
    while (ticks_ < count()) tick();
  }
  // This window's tick that waits for the end of backward, with all that follow; none: those up to the last bucket do not wait.
  void wait_before(std::optional<size_t> tick) { waits_ = tick; }
  bool next_waits() const { return waits_ && ticks_ >= *waits_; }
  // Waits for every bucket that is not finished yet, and finishes it.
  void finish_all();
  // Makes the current streams wait for all that finishing has begun.
  void join_current_streams();
  // See Reducer::measure().
  at::Tensor measure(const Window& window);
  // In the middle of a window, before the buckets are destroyed.
  void leave_behind();

  // Whether finishing has written numbers that are not finite, as far as they were measured on the way and the host knows.
  bool has_written_not_finite() const;

  // In a window that failed, or in which this rank has no part: note [A window that fails], pipeline/exchange.h. abandon_rest()
  // replaces the ticks and finishes that are left; void_what_was_done() comes first, if anything was done.
  void void_what_was_done();
  void abandon_rest(double value) {
    for (; ticks_ < count(); ++ticks_) exchange_->abandon(ticks_, value);
    while (finished_ < buckets_.size()) exchange_->recover(buckets_[finished_++]);
  }

 private:
  size_t count() const { return buckets_.size() + exchange_->lag(); }
  void finish_arrived();
  void finish_next();

  Buckets& buckets_;
  Timeline& timeline_;
  std::shared_ptr<Exchange> exchange_;
  const std::function<void(Bucket&)> on_finished_;
  size_t ticks_ = 0;
  size_t finished_ = 0;  // how many buckets are finished
  std::optional<size_t> waits_;
};

}  // namespace fastddp
