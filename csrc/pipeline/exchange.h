// How the gradients of the buckets travel between ranks.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bucket/bucket.h"
#include "bucket/node_shards.h"
#include "codec/codec.h"
#include "pipeline/user_code.h"
#include "transport/average.h"
#include "transport/registered_memory.h"
#include "transport/transport.h"

namespace fastddp {

// Note [Ticks]
// A window has as many ticks as there are buckets, and some more. Tick k begins the exchange of bucket k and goes on with
// those of the buckets before. A tick happens when its bucket and all before it are complete, so what is started in which
// order depends on the plan alone. What comes behind the last collective of a bucket starts nothing, and runs as soon as that
// one happens to be done: finish().
//
// Everything in which a plain allreduce, a compressed one and a user's hook differ is behind this interface. The reducer
// decides only when. No call takes the GIL, except where an exchange runs Python code.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // The lock under which all functions here are called. Where an exchange runs code of users, or waits for some, it does so
  // without (note [User code], user_code.h). An exchange belongs to one reducer.
  void called_under(std::mutex& lock) {
    TORCH_CHECK_VALUE(lock_ == nullptr,
                      "fastddp: an exchange belongs to one reducer, and this one has its reducer "
                      "already. Make another one.");
    lock_ = &lock;
  }

  // What the gradients of coming windows count.
  virtual void set_average(const Average& average) {}

  // The ranks with which this one shares gradients; null: with none, each rank keeps its own. What travels besides this
  // exchange and decides over gradients (sparse ones, who used which parameter) goes over the same ranks.
  virtual c10d::ProcessGroup* group() const = 0;

  // Over which collectives of buckets are dealt in turn, the first one is group(). Null: there are not so many, or what
  // travels is no collectives.
  virtual c10d::ProcessGroup* lane(size_t number) const { return number == 0 ? group() : nullptr; }

  // All that it sends over.
  virtual std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const = 0;

  // What gradients are multiplied by before the ranks of group() add them up: sparse ones, which travel beside.
  virtual double scale() const = 0;

  // Of the plan's buckets this exchange has some only, and others have the rest: note [An exchange for each bucket],
  // per_bucket.cpp. Before the first prepare(), for good. prepare() and the ticks are about all buckets as ever, what is
  // called for a bucket is called for those that it carries.
  struct Share {
    std::vector<bool> carries;  // by bucket
    size_t number;              // of this exchange among those that share the buckets
    size_t exchanges;
  };
  virtual void carry(Share share) {
    TORCH_CHECK_VALUE(false, "fastddp: this exchange carries all buckets of a plan, or none.");
  }

  // The buckets of a new plan, or of the plan that the exchange before had, between two windows. Says what their wires
  // have to be. Both outlive the exchange, or the next prepare(). `slabs`: where wires that are not there yet may have a place;
  // null: nowhere.
  virtual void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) = 0;

  // How many ticks behind its first a bucket's last collective is started; so many ticks follow that of the last bucket.
  virtual size_t lag() const { return 0; }

  // A gradient of `bucket` is final; its tick follows when all are.
  virtual void on_gradient(Bucket& bucket, size_t member) = 0;

  // Note [Ticks]. Called on the stream of the last gradient of bucket `tick`.
  virtual void tick(size_t tick) = 0;

  // Whether finish() would not keep the calling thread waiting.
  virtual bool arrived(const Bucket& bucket) const = 0;

  // Once the last collective of `bucket` is started: calls back when it is done, from any thread; on a device with streams
  // maybe sooner, with a stream current that waits for it. Never, where the process group does not tell.
  virtual void when_arrived(const Bucket& bucket, std::function<void()> call) {}

  // With a side stream current: waits for the last collective and writes the gradients. On a device with streams only the
  // side stream waits, where the process group allows it.
  virtual void finish(Bucket& bucket) = 0;

  // Whether all collectives of a window have been started when the last tick has been. Hooks of users may start some in
  // callbacks, at moments that differ between ranks: nothing may be started among those.
  virtual bool starts_all_in_ticks() const { return true; }

  // Whether a tick runs code of a user's.
  virtual bool runs_user_code() const { return false; }

  // The window has ended, and the current streams have waited for all that it did: note [Lent wires], bucket/wire.h.
  virtual void let_wires_go() {}

  // Nobody used the parameter: what this window has made of the placeholder will be dropped.
  virtual void discard(Bucket& bucket, size_t member) {}

  // Note [Late gradients], reducer/closing.h: starts to average the wire of `bucket`, which is none of the plan's, on the current
  // stream, which has waited for the side streams. Gradients in it are not scaled. What it returns waits, and leaves the
  // average in the wire. If it raises it has started nothing.
  virtual std::function<void()> start_late(Bucket& bucket) = 0;

  // Between two windows: note [What is remembered for good], codec.h.
  virtual void keep() {}
  virtual void undo(const at::Tensor& only_if) {}

  // What `Bucket::measured` is, after finish().
  virtual const std::vector<at::Tensor>& measure(Bucket& bucket) { return bucket.measure(); }

  // Note [A window that fails]
  // A rank on which backward raised has started the collectives of some buckets, other ranks those of all. Each rank
  // starts the collectives of every bucket in every window whatever happens, or the next window's would meet the ones
  // that are missing. So before its next window, a rank whose window failed calls drain(), then abandon() in place of each
  // tick() that it has not called, or that raised, in the same order, then recover() in place of each finish(): it takes part
  // without its gradients and ignores the result. A tick() that raised has started a part of what it was to start, or
  // nothing, or all of it: abandon() starts what is left.

  // Takes part in what the tick has left to start, with `value` in place of gradients where no state of others depends on
  // it, and waits for it. Neither gradients nor the wires that they may live in are read or written. A rank that has joined
  // (torch's Join) does the same with zeros.
  virtual void abandon(size_t tick, double value) = 0;

  virtual void recover(Bucket& bucket) {}

  // Waits for all collectives in flight, like finish(), and forgets them; errors are dropped with the results. Then all that
  // is remembered is undone. Gradients may have been changed since the window failed, or be gone.
  virtual void drain() = 0;

 protected:
  // Where it is not there yet, and will stay: note [Memory of wires], bucket/wire_memory.h.
  // `may_be_symmetric`: what is sent in its place in a window that failed is written there.
  static void reserve_wire(Bucket& bucket, c10d::ProcessGroup& group, Slabs* slabs, bool may_be_symmetric = false) {
    bucket.wire.comes_from(nullptr);
    if (slabs == nullptr || bucket.wire.exists() || bucket.lends_wire()) return;
    if (slabs->are_symmetric() && !may_be_symmetric) return;
    const auto bytes = Slabs::bytes(bucket.layout.wire_length(), bucket.layout.format().dtype);
    bucket.wire.comes_from(slabs->reserve(group, bucket.device(), bytes));
  }

  template <typename Function>
  auto without_lock(const Function& function) const {
    const Unlocked unlocked(*lock_);
    return function();
  }

 private:
  std::mutex* lock_ = nullptr;
};

// What `codec` makes of the buckets, by `transport`; pipeline.cpp.
std::unique_ptr<Exchange> make_pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport);

// Each bucket by one of several exchanges over the same ranks: `of_buckets` has its number; per_bucket.cpp.
std::unique_ptr<Exchange> make_per_bucket(std::vector<std::shared_ptr<Exchange>> exchanges,
                                          std::vector<size_t> of_buckets);

// Ranks that share gradients, this one among them.
struct TwoLevelGroups {
  c10::intrusive_ptr<c10d::ProcessGroup> all;
  c10::intrusive_ptr<c10d::ProcessGroup> node;  // those of this rank's node
};

// The ranks of a node add up, `outer` exchanges the sums with other nodes, over ranks in the same place of theirs, and what
// comes of it goes to all ranks of the node; two_level.cpp. `remembers`: what `outer` does in a window depends on earlier
// ones, and it needs an average over nodes, not a sum.
std::unique_ptr<Exchange> make_two_level(std::shared_ptr<Exchange> outer, std::shared_ptr<NodeShards> shards,
                                         TwoLevelGroups groups, bool remembers);

// Each rank keeps its gradients, as they are: how fast a step would be without communication.
std::unique_ptr<Exchange> make_noop();

// What an object of Python's is: a tensor, or an undefined one; and the name of its type. Takes the GIL.
struct Seen {
  at::Tensor tensor;
  std::string type;
};
using LookAtPython = Seen (*)(PyObject* object);

// What a hook written for torch's DDP does with each bucket, which holds unscaled gradients. It is `name` to its user.
// `group`: that of the model. `others`: that the hook may send over. `look`: at what the hook's futures hold.
std::unique_ptr<Exchange> make_python_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name,
                                           c10::intrusive_ptr<c10d::ProcessGroup> group,
                                           std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> others,
                                           LookAtPython look);

}  // namespace fastddp
