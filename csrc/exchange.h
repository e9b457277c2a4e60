// How the gradients of one bucket travel between ranks.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bucket.h"
#include "lanes.h"

namespace fastddp {

// Everything in which a plain allreduce, a compressed one and a user's hook differ is behind this interface: the wire's
// contents, the collectives, and the division by the number of ranks. The reducer decides only when.
//
// An exchange is a list of stages with a collective between two of them. For each bucket, start(0), start(1), ...,
// start(collectives() - 1) and finish() are called once a window in this order, start(i) of bucket k in the same tick as
// start(i + 1) of bucket k - 1: so the order of collectives is the same on all ranks. No call takes the GIL, except
// where an exchange runs Python code.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Note [The divisor]
  // Where an exchange adds up gradients, it multiplies them by factor / ranks before: 1 makes the mean. The factor may differ
  // between ranks and windows.
  void set_factor(double factor) {
    factor_ = factor;
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

  // Whether ranks get anything of each other. If not, a parameter is used where this rank uses it.
  virtual bool is_shared() const {
    return true;
  }

  // Nobody used the parameter: what finish() has made of the stand-in will be dropped.
  virtual void forgo(Bucket& bucket, size_t member) {}

  // Note [Late gradients], reducer.h: averages the wire of `bucket`, which is none of the plan's, and waits for it, with a
  // side stream current. Gradients in it are not scaled.
  virtual void exchange_late(Bucket& bucket) = 0;

  // What `Bucket::measured` is, after finish().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) {
    return fastddp::measure(bucket);
  }

  // Note [A window that fails]
  // A rank on which backward raised has started the collectives of some buckets, other ranks those of all. Each rank
  // starts the collectives of every bucket in every window whatever happens, or the next window's would meet the ones
  // that are missing. So before its next window, a rank whose window failed calls abandon() in place of each start() that
  // it has not called, in the same order: it takes part without its gradients and ignores the result.

  // Takes part in collective `stage` of `bucket`, with `value` in place of gradients where no state of others depends on it,
  // and waits for it. Neither gradients nor wire are read or written. A rank that has joined (torch's Join) does the same with
  // zeros.
  virtual void abandon(size_t stage, Bucket& bucket, double value) = 0;

  // After that, for each bucket that finish() was not called for.
  virtual void recover(Bucket& bucket) {}

  // Waits for all collectives in flight, like finish(), and forgets them; errors are dropped with the results.
  virtual void drain() = 0;

  // Waits for the last collective of `bucket` for as long as this, where it is the host that waits; whether it is done.
  virtual bool arrives_within(const Bucket& bucket, std::chrono::milliseconds time) {
    return true;
  }

 protected:
  double factor_ = 1.0;
};

// The sum over ranks of the gradients scaled by 1/ranks: torch's DDP without a hook. `wire`: the dtype that they travel
// and are added up in; none: that of the parameters.
// `divide_in_collective`: the collective averages, so that gradients that live in their wire need no kernel. For groups
// whose average multiplies before it adds; the same on all ranks, whatever their gradients are.
std::unique_ptr<Exchange> make_all_reduce(Lanes lanes, std::optional<c10::ScalarType> wire = std::nullopt,
                                          bool divide_in_collective = false);

// The same with two collectives: gradients travel in `wire`, but each rank adds up its share of them in fp32.
std::unique_ptr<Exchange> make_wide_sum(Lanes lanes, c10::ScalarType wire);

// Each rank keeps its gradients, as they are: how fast a step would be without communication.
std::unique_ptr<Exchange> make_noop();

// What a hook written for torch's DDP does with each bucket, which holds unscaled gradients.
std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook);

}  // namespace fastddp
