// Conducts the exchange of gradients of one model. Their way: docs/design.md, section 1.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/backward.h"
#include "autograd/grad_hooks.h"
#include "bucket/buckets.h"
#include "pipeline/exchange.h"
#include "pipeline/user_code.h"
#include "reducer/averaged.h"
#include "reducer/closing.h"
#include "reducer/failure.h"
#include "reducer/local_gradients.h"
#include "reducer/observer.h"
#include "reducer/reduction.h"
#include "reducer/shared_sums.h"
#include "reducer/ticks.h"
#include "window/window.h"

namespace fastddp {

// Owns the parts and decides when each does its work; how is theirs.
// All methods may be called with or without the GIL; none needs it.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `plan`: the parameters of each bucket, in the order of collectives; each parameter is in exactly one, except for those
  // that no rank uses, once that is known, and the `sparse` ones, whose gradients are sparse tensors (sparse.h).
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Plan& plan,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group, GradientForm form, Expect expect = Expect::all,
          std::vector<size_t> sparse = {});
  // In the middle of a window, too.
  ~Reducer();
  // Before every forward. Repairs after a failed window, with a warning that says what had failed. Waits for a backward that
  // runs in another thread, unless this forward is one without gradients, which changes nothing.
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients. `outputs`: its tensors, by which that backward comes. A backward
  // that comes by none of them begins before its first gradient, which may be inside a reentrant checkpoint.
  void arm(const std::vector<at::Tensor>& outputs = {});

  // Of a window that is partial: the parameters without a gradient; and its end, in failure.
  std::vector<size_t> missing() const {
    const std::lock_guard lock(mutex_);
    return reduction_.missing();
  }
  void give_up();

  // A window in which this rank has nothing to add, while others run one (torch's Join): takes part in its collectives.
  void shadow_window();

  // Note [Steps]
  // What codecs remember counts when an optimizer has stepped (note [What is remembered for good], codec.h). So a step begins
  // when the one before has been taken, and has as many windows as there are until the next is. Where no optimizer of the model
  // has ever been seen to step, a forward after a window begins one, unless the window's gradients are still in `.grad`: then
  // its backward adds to them. A window that fails makes its step void.

  // An optimizer of the model steps, or has.
  void note_optimizer(bool begins);
  // No optimizer steps with the gradients of this step. `only_if`: one element, on any device; 0: some does. Undefined: none.
  void discard_step(at::Tensor only_if);

  // What the gradients of coming windows count; average.h.
  void set_average(const Average& average);

  // Calls back when the gradients of these parameters are final and averaged, inside the backward, on the stream on which
  // they were written.
  void on_averaged(Averaged::Callback callback);

  // Ends this rank's waits for others, and all further use; it may outlive this object.
  std::shared_ptr<Interruption> interruption() const { return interruption_; }

  // What has been seen, and is to be looked at.
  Locked<Observer> observer() { return {std::unique_lock(mutex_), observer_}; }
  // What is known of windows and of the parameters that they use. The same on all ranks, but for the order of arrival.
  Locked<const Window> window() const { return {std::unique_lock(mutex_), window_}; }

  Locked<const Buckets> buckets() const { return {std::unique_lock(mutex_), buckets_}; }
  // What this rank's gradients were, up to now.
  Locked<LocalGradients> local_gradients();

  // What the gradients of coming windows are expected to be; between two windows.
  void set_expect(Expect expect);
  // as_first: buckets follow which hold only what any rank used in the first window that went well on all of them, and windows
  // that use it as often as that one did.
  void fix_usage();

  // Windows that have ended, well or not: the same number on all ranks.
  size_t windows();

  // Of the gradients that the last window left: the sum of their squares and how many elements are not finite, fp64, on
  // the device of the first bucket. The host does not wait for it.
  at::Tensor measure() {
    const std::lock_guard lock(mutex_);
    return ticks_.measure(window_);
  }

  // Replaces the buckets, between two windows.
  void set_plan(const Plan& plan);

  // Whether a gradient that comes now may be averaged.
  bool reacts() const { return window_.is_open(); }
  const c10d::ProcessGroup& process_group() const { return *process_group_; }

  // The backward of the model has collectives of its own over the same ranks: note [Order among collectives].
  void share_order() {
    const std::lock_guard lock(mutex_);
    reduction_.share_order();
  }

  // Which model of its process group this is, on all ranks; 0: ranks do not agree on a number.
  void is_model(size_t number) {
    const std::lock_guard lock(mutex_);
    closing_.is_model(number);
  }

  void set_exchange(std::shared_ptr<Exchange> exchange);

  // Where the wires of coming exchanges come from, if not from ordinary memory. Behind a new plan they wait for their exchange.
  void use_memory(std::shared_ptr<const RegisteredMemory> memory);

  WindowState state();
  // Of a window that has failed: why.
  std::string failure();

  // Those whose gradients come by no more, because autograd has forgotten the hooks.
  std::vector<size_t> parameters_without_hook() const { return hooks_.lost(buckets_.parameters()); }

  void remove_hooks() { hooks_.remove(); }

 private:
  // Moves the window on; where a new one begins, the rest of this object too.
  void take(WindowEvent event);
  void begin_window();
  void place_gradients();

  // From a forward to a gradient.
  void on_backward_begin();
  void note_backward();
  void before_gradient(size_t parameter);
  bool adds_up() const;
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void on_local_gradient(size_t parameter, bool exclusive);
  void begin_reduction();

  // The end of a backward.
  void on_backward_end();
  void finish_window();

  // Windows that fail.
  void notice_failure();
  void fail_here(const std::string& what);
  void fail();
  void repair();

  void check_between_windows(const char* what, bool may_be_armed = true) const;

  const std::shared_ptr<Interruption> interruption_ = std::make_shared<Interruption>();
  mutable std::mutex mutex_;
  Conductor conductor_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  Buckets buckets_;
  Window window_;
  Averaged averaged_;
  Backwards backwards_;
  bool steps_are_seen_ = false;                     // of optimizers of this model
  bool stepped_in_window_ = false;                  // in backward
  std::shared_ptr<const RegisteredMemory> memory_;  // null: ordinary
  std::vector<size_t> movable_;                     // gradients that wait for the wires of the next exchange
  Average average_;
  Observer observer_;
  Ticks ticks_;
  SharedSums shared_sums_;
  Reduction reduction_;
  LocalGradients local_;
  Closing closing_;
  Failure failure_;
  GradHooks hooks_;  // last: they call the members above
};

}  // namespace fastddp
