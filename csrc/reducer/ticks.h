// The ticks of a window, and what follows each: note [Ticks], pipeline/exchange.h.
#pragma once

#include <functional>
#include <memory>

#include "bucket/buckets.h"
#include "pipeline/exchange.h"
#include "reducer/observer.h"
#include "window/window.h"

namespace fastddp {

// Calls an exchange in the order of the plan, and finishes buckets as soon as they have arrived.
class Ticks {
 public:
  // Calls back when the gradients of a bucket are what the exchange makes of them, on the stream on which it wrote them.
  Ticks(Buckets& buckets, Observer& observer, std::shared_ptr<Exchange> exchange,
        std::function<void(Bucket& bucket)> on_finished);

  Exchange& exchange() const { return *exchange_; }
  const std::shared_ptr<Exchange>& shared_exchange() const { return exchange_; }
  void set_exchange(std::shared_ptr<Exchange> exchange);
  // Begins a window.
  void reset();

  // The bucket whose exchange begins next; as many as there are buckets: none.
  size_t next() const { return ticks_; }
  void tick();
  void tick_to_the_end();
  // Waits for every bucket that is not finished yet.
  void finish_all();
  // The current streams wait for all that finishing has begun.
  void join_current_streams();
  // Of the gradients that the window left: Reducer::measure().
  at::Tensor measure(const Window& window);
  // In the middle of a window, before the buckets go.
  void leave_behind();

  // Whether finishing has written something that is not finite, as far as it was measured on the way and the host knows it.
  bool has_written_not_finite() const;

  // In place of what is left, in a window that failed or in which this rank has no part: note [A window that fails],
  // pipeline/exchange.h. void_what_was_done() comes first, where something was.
  void void_what_was_done();
  void abandon_rest(double value);

 private:
  size_t count() const;
  void finish_arrived();
  void finish_next();

  Buckets& buckets_;
  Observer& observer_;
  std::shared_ptr<Exchange> exchange_;
  const std::function<void(Bucket&)> on_finished_;
  size_t ticks_ = 0;
  size_t finished_ = 0;  // buckets
};

}  // namespace fastddp
