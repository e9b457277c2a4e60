// An exchange: how the gradients of the buckets travel between ranks.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bucket/bucket.h"
#include "pipeline/user_code.h"
#include "transport/registered_memory.h"
#include "transport/weighting.h"

namespace fastddp {

// Note [Ticks]
// A window has a tick for each bucket, and some more. Tick k begins the exchange of bucket k and continues those of earlier
// buckets. A tick happens when its bucket and all earlier ones are complete. So the order of all collectives depends on the
// plan alone. Only finish() runs at no fixed moment: as soon as the last collective of its bucket is done. It starts nothing.
//
// This interface hides all differences between a plain allreduce, a compressed one and a user's hook. The reducer decides only
// when. No call takes the GIL, except if an exchange runs Python code.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Sets the lock under which all functions here are called. An exchange releases it while it runs users' code, or waits for
  // it (note [User code], user_code.h). An exchange belongs to one reducer.
  void called_under(std::mutex& lock) {
    TORCH_CHECK_VALUE(lock_ == nullptr,
                      "fastddp: an exchange belongs to one reducer, and this one has its reducer "
                      "already. Make another one.");
    lock_ = &lock;
  }

  // Sets the kind of average for the windows that follow.
  virtual void set_weighting(const Weighting& weighting) {}

  // The ranks with which this rank shares gradients. Null: none, each rank keeps its own. Everything else that decides about
  // gradients (sparse gradients, and which ranks used which parameter) goes over the same ranks.
  virtual c10d::ProcessGroup* group() const = 0;

  // The collectives of buckets are dealt over lanes in turn. Lane 0 is group(). Null: there are fewer lanes, or buckets do not
  // travel by collectives.
  virtual c10d::ProcessGroup* lane(size_t number) const { return number == 0 ? group() : nullptr; }

  // All groups that it sends over.
  virtual std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const = 0;

  // The factor for sparse gradients, which travel outside the exchange, before the ranks of group() add them up.
  virtual double scale() const = 0;

  // Takes the buckets of a new plan, or of the previous exchange's plan, between two windows. Sets the formats of their wires.
  // Buckets and side streams live until the exchange ends, or until the next prepare(). `slabs`: the places for wires that do
  // not exist yet; null: no such memory.
  virtual void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) = 0;

  // A bucket's last collective starts this many ticks after its own tick. So as many ticks follow that of the last bucket.
  virtual size_t lag() const { return 0; }

  // A gradient of `bucket` is final; its tick follows when all are.
  virtual void on_gradient(Bucket& bucket, size_t member) = 0;

  // Note [Ticks]. Called on the stream of the last gradient of bucket `tick`.
  virtual void tick(size_t tick) = 0;

  // Whether finish() would not block the calling thread. Reads what has come, where ranks read: note [Reads], transport/reads.h.
  virtual bool arrived(const Bucket& bucket) = 0;

  // Called once the last collective of `bucket` has started. Calls `call` when the collective is done, from any thread. On a
  // device with streams the call may come sooner, with a current stream that waits for the collective. It never comes if the
  // process group has no futures.
  virtual void when_arrived(const Bucket& bucket, std::function<void()> call) {}

  // With a side stream current: waits for the last collective and writes the gradients. On a device with streams only the
  // side stream waits, if the process group allows it.
  virtual void finish(Bucket& bucket) = 0;

  // Whether all collectives of a window have started after the last tick. Users' hooks may start some in callbacks, at moments
  // that differ between ranks. Then nothing else may be started in between.
  virtual bool starts_all_in_ticks() const { return true; }

  // Note [Room for the status]
  // The status of a window (note [Status of a window], window/status.h) can travel with the gradients of the last bucket: as
  // kStatusRoom numbers, which ranks add up. status_tick() is the tick in which it does; none: it has to travel by itself. Then
  // `write` is called with the room when all else is in the message, also if the tick is abandoned. When the bucket has been
  // finished or recovered, take_status() returns the sums over ranks times `factor`.
  static constexpr int64_t kStatusRoom = 102;
  virtual std::optional<size_t> status_tick() const { return std::nullopt; }
  using WriteStatus = std::function<void(const at::Tensor& room)>;
  virtual void status_is_written_by(WriteStatus write) {}
  struct Status {
    at::Tensor sums;
    double factor;
  };
  virtual Status take_status() { return {}; }

  // Whether a tick runs a user's code.
  virtual bool runs_user_code() const { return false; }

  // The window has ended, and the current streams have waited for all of its work: note [Lent wires], bucket/wire.h.
  virtual void let_wires_go() {}

  // No rank used the parameter, so this window's result for its placeholder will be dropped.
  virtual void discard(Bucket& bucket, size_t member) {}

  // Note [Late gradients], reducer/closing.h. Starts to average the wire of `bucket`, which is not one of the plan's, on the
  // current stream, which has waited for the side streams. The wire holds unscaled gradients. The returned function waits and
  // leaves the average in the wire. If start_late() raises, it has started nothing.
  virtual std::function<void()> start_late(Bucket& bucket) = 0;

  // Between two windows: note [What is remembered for good], codec.h.
  virtual void keep() {}
  virtual void undo(const at::Tensor& only_if) {}

  // Returns `BucketWindow::measured`, after finish().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) { return bucket.measure(); }

  // Note [A window that fails]
  // If backward raises on a rank, that rank has started the collectives of some buckets, the other ranks those of all. Each rank
  // has to start the collectives of every bucket in every window, or those of the next window would meet the missing ones. So
  // before its next window, a rank whose window failed calls drain(). Then it calls abandon() for each tick() that it has not
  // called or that raised, in the same order. Then it calls recover() in place of each finish(). So it takes part without
  // its gradients and ignores the result. A tick() that raised may have started none, some or all of its collectives: abandon()
  // starts the rest.

  // Starts the collectives that the tick has not started, and waits for them. Sends `value` in place of gradients, except where
  // other ranks' state would depend on it. Neither reads nor writes gradients or wires that they may live in. A rank that has
  // joined (torch's Join) does the same with zeros.
  virtual void abandon(size_t tick, double value) = 0;

  virtual void recover(Bucket& bucket) {}

  // Waits for all collectives in flight, like finish(), and forgets them. Drops their errors and results. Then undoes all that
  // codecs remember of the step. Gradients may have changed since the window failed, or be gone.
  virtual void drain() = 0;

 protected:
  template <typename Function>
  auto without_lock(const Function& function) const {
    const Unlocked unlocked(*lock_);
    return function();
  }

 private:
  std::mutex* lock_ = nullptr;
};

// Each rank keeps its gradients as they are. Shows how fast a step would be without communication.
std::unique_ptr<Exchange> make_noop();

// Looks at a Python object: returns its tensor (undefined: it is none) and the name of its type. Takes the GIL.
struct Seen {
  at::Tensor tensor;
  std::string type;
};
using LookAtPython = Seen (*)(PyObject* object);

// Runs a hook written for torch's DDP for each bucket, which holds unscaled gradients. `name`: the hook's name in messages.
// `group`: the model's. `others`: groups that the hook may send over too. `look`: looks at the values of the hook's futures.
std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name,
                                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                                           std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> others, LookAtPython look);

}  // namespace fastddp
