// Hooks written for torch's DDP, as a collective of a trip.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bucket/bucket.h"
#include "transport/collectives.h"

namespace fastddp {

// Looks at a Python object: returns its tensor (undefined: it is none) and the name of its type. Takes the GIL.
struct Looked {
  at::Tensor tensor;
  std::string type;
};
using LookAtPython = Looked (*)(PyObject* object);

// Runs the hook for each bucket, which holds unscaled gradients. It runs without the reducer's lock (note [User code],
// user_code.h), and with the thread's Python objects.
class Hook : public Collective {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // `name`: the hook's name in messages. `look`: looks at the values of its futures.
  Hook(std::unique_ptr<c10d::CommHookInterface> hook, std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group,
       LookAtPython look)
      : Collective(Lanes({std::move(group)})), hook_(std::move(hook)), name_(std::move(name)), look_(look) {}

  // The buckets of a plan, and the lock under which all functions here are called.
  void use(std::vector<Bucket>& buckets, std::mutex& lock) {
    buckets_ = &buckets;
    lock_ = &lock;
  }

  void start(c10d::ProcessGroup&, Piece& piece) const override;
  // Leaves the result in `piece.sum`.
  void add_up(Piece& piece) const override;
  // Forgets what is in flight.
  void give_room_back() const override { in_flight_.clear(); }
  // For one bucket that is not in the plan: averages its wire.
  std::function<void()> start_late(Bucket& bucket) const;
  // In a window that has failed: a hook may build state from its inputs, and the state has to survive. So it gets zeros, although
  // other ranks would notice NaN. Warns if it raises.
  void run_void(const Bucket& bucket) const;

 private:
  Future run(const Bucket& bucket, const at::Tensor& buffer) const;
  void wait_for_hook_in_flight() const;
  at::Tensor result(c10::ivalue::Future& future, const Bucket& bucket) const;
  at::Tensor tensor_in(const c10::IValue& value, const Bucket& bucket) const;

  const std::unique_ptr<c10d::CommHookInterface> hook_;
  const std::string name_;
  const LookAtPython look_;
  std::vector<Bucket>* buckets_ = nullptr;
  std::mutex* lock_ = nullptr;
  mutable std::map<size_t, Future> in_flight_;  // by bucket
  mutable bool one_in_flight_ = true;           // on the CPU
};

}  // namespace fastddp
