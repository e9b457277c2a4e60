// How the gradients of one bucket travel between ranks.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "average.h"
#include "bucket.h"
#include "lanes.h"
#include "levels.h"
#include "user_code.h"

namespace fastddp {

// Everything in which a plain allreduce, a compressed one and a user's hook differ is behind this interface: the wire's
// contents, the ranks, the collectives, and what gradients are scaled by. The reducer decides only when.
//
// An exchange is a list of stages with a collective between two of them. For each bucket, start(0), start(1), ...,
// start(collectives() - 1) and finish() are called once a window in this order, start(i) of bucket k in the same tick as
// start(i + 1) of bucket k - 1: so the order of collectives is the same on all ranks. No call takes the GIL, except
// where an exchange runs Python code.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // The lock under which all functions here are called. Where an exchange runs code of users, or waits for some, it does so
  // without (note [User code], user_code.h).
  void called_under(std::mutex& lock) {
    lock_ = &lock;
  }

  // What the gradients of coming windows count.
  void set_average(const Average& average) {
    average_ = average;
  }

  // The ranks with which this one shares gradients; null: with none, each rank keeps its own. What travels besides this
  // exchange and decides over gradients (sparse ones, who used which parameter) goes over the same ranks.
  virtual c10d::ProcessGroup* group() const = 0;

  // What gradients are multiplied by before the ranks of group() add them up.
  double scale() const {
    return average_.scale(group()->getSize());
  }

  // The buckets of a new plan, or of the plan that the exchange before had, between two windows. Says what their wires
  // have to be.
  virtual void prepare(std::vector<Bucket>& buckets) = 0;

  virtual size_t collectives() const {
    return 1;
  }

  // A gradient of `bucket` is final; start(0) follows when all are.
  virtual void on_gradient(Bucket& bucket, size_t member) = 0;

  // Runs stage `stage`, which ends by starting collective `stage`, or leaves that to end_tick(). Stage 0 reads the
  // gradients, on the stream of the last one; the others run with a side stream current.
  virtual void start(size_t stage, Bucket& bucket) = 0;

  // After the stages of a tick, if there is more than one collective a bucket; a side stream that has waited for stage 0 is
  // current. What they have to send may travel together from here.
  virtual void end_tick(size_t tick) {}

  // Whether finish() would not keep the calling thread waiting.
  virtual bool arrived(const Bucket& bucket) const = 0;

  // Once the last collective of `bucket` is started: calls back when it is done, from any thread; on a device with streams
  // maybe sooner, with a stream current that waits for it. Never, where the process group does not tell.
  virtual void when_arrived(const Bucket& bucket, std::function<void()> call) {}

  // Runs the last stage, with a side stream current: waits for the last collective and writes the gradients. On a device
  // with streams only the side stream waits, where the process group allows it.
  virtual void finish(Bucket& bucket) = 0;

  // Whether all collectives of a window have been started when the last tick has been. Hooks of users may start some in
  // callbacks, at moments that differ between ranks: nothing may be started among those.
  virtual bool starts_all_in_ticks() const {
    return true;
  }

  // Nobody used the parameter: what finish() has made of the stand-in will be dropped.
  virtual void forgo(Bucket& bucket, size_t member) {}

  // Note [Late gradients], reducer.h: starts to average the wire of `bucket`, which is none of the plan's, on the current
  // stream, which has waited for the side streams. Gradients in it are not scaled. What it returns waits, and leaves the
  // average in the wire. If it raises it has started nothing.
  virtual std::function<void()> start_late(Bucket& bucket) = 0;

  // What `Bucket::measured` is, after finish().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) {
    return fastddp::measure(bucket);
  }

  // Note [A window that fails]
  // A rank on which backward raised has started the collectives of some buckets, other ranks those of all. Each rank
  // starts the collectives of every bucket in every window whatever happens, or the next window's would meet the ones
  // that are missing. So before its next window, a rank whose window failed calls drain(), then abandon() in place of each
  // start() that it has not called, in the same order: it takes part without its gradients and ignores the result. A
  // start() or end_tick() that raised has started a part of what it was to start, or nothing, or all of it: after it
  // abandon() and end_tick() are called too, and start what is left; note [Collectives that were started], in_flight.h.

  // Takes part in what collective `stage` of `bucket` has left to start, with `value` in place of gradients where no state of
  // others depends on it, and waits for it. Neither gradients nor wire are read or written. A rank that has joined (torch's
  // Join) does the same with zeros.
  virtual void abandon(size_t stage, Bucket& bucket, double value) = 0;

  // After that, for each bucket that finish() was not called for.
  virtual void recover(Bucket& bucket) {}

  // Waits for all collectives in flight, like finish(), and forgets them; errors are dropped with the results. Gradients
  // may have been changed since the window failed, or be gone.
  virtual void drain() = 0;

 protected:
  template <typename Function>
  auto without_lock(const Function& function) const {
    const Unlocked unlocked(*lock_);
    return function();
  }

  Average average_;

 private:
  std::mutex* lock_ = nullptr;
};

// The average over the ranks of the lanes; of the mean: torch's DDP without a hook. `wire`: the dtype that they travel
// and are added up in; none: that of the parameters.
// `divide_in_collective`: the collective averages, so that gradients that live in their wire need no kernel. For groups
// whose average multiplies before it adds; the same on all ranks, whatever their gradients are.
std::unique_ptr<Exchange> make_all_reduce(Lanes lanes, std::optional<c10::ScalarType> wire = std::nullopt,
                                          bool divide_in_collective = false);

// The same with two collectives or four: gradients travel in `wire`, but each rank adds up its share of them in fp32.
// `nodes` says which ranks share a machine: note [Two levels], levels.h.
std::unique_ptr<Exchange> make_wide_sum(Lanes lanes, c10::ScalarType wire, Nodes nodes);

// Each rank keeps its gradients, as they are: how fast a step would be without communication.
std::unique_ptr<Exchange> make_noop();

// What a hook written for torch's DDP does with each bucket, which holds unscaled gradients. It is `name` to its user.
// `group`: that of the model.
std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name,
                                           c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace fastddp
