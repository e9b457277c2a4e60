// Conducts the exchange of one model's gradients. docs/design.md, section 1, follows a gradient on its way.
#pragma once

#include <atomic>
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
#include "reducer/reduction.h"
#include "reducer/shared_sums.h"
#include "reducer/ticks.h"
#include "reducer/timeline.h"
#include "transport/gather.h"
#include "waits/interruption.h"
#include "window/window.h"

namespace fastddp {

// Owns the parts and decides when each of them works; a part decides how.
// All methods may be called with or without the GIL; none needs it.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `plan`: the parameters of each bucket, in the order of collectives. Each parameter is in exactly one bucket, except those
  // known to be used by no rank, and the `sparse` ones, whose gradients are sparse tensors (sparse.h).
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Plan& plan,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group, GradientForm form, Expect expect = Expect::all,
          std::vector<size_t> sparse = {});
  // Also in the middle of a window.
  ~Reducer();
  // Before every forward. Repairs after a failed window, with a warning that says what failed. Waits for a backward that runs
  // in another thread; a forward without gradients changes nothing, and does not wait.
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients. `outputs`: the forward's tensors, where that backward begins. A
  // backward that reaches none of them begins before its first gradient, which may be inside a reentrant checkpoint.
  void arm(const std::vector<at::Tensor>& outputs = {});

  // The parameters without a gradient in a partial window; give_up() makes that window fail.
  std::vector<size_t> missing() const {
    const std::lock_guard lock(mutex_);
    return reduction_.missing();
  }
  void give_up() {
    const std::lock_guard lock(mutex_);
    if (window_.is(WindowState::partial)) fail_here("left parameters without a gradient");
  }

  // Repairs a window that failed, as the next forward would, unless a backward runs this.
  void repair_if_failed();

  // Takes part in the collectives of a window of other ranks, in which this rank has nothing to add (torch's Join).
  void shadow_window();

  // Note [Steps]
  // What codecs remember becomes valid when an optimizer steps (note [What is remembered for good], codec.h). So a step lasts
  // from one step of the optimizer to the next, with any number of windows. If no optimizer of the model has ever been seen to
  // step, a forward begins one, unless gradients are still in `.grad`: then the next backward adds to them. A window that fails
  // makes its step void. So does a backward that finds the last window's gradients removed, although no optimizer has stepped
  // with them: the loop has skipped the step.

  // An optimizer of the model begins or ends its step.
  void note_optimizer(bool begins);
  // No optimizer steps with the gradients of this step. `only_if`: one element, on any device; if it is 0, one does step.
  void discard_step(at::Tensor only_if);

  // Sends this rank's parameters of a bucket, and waits for those of the others (gather.h). Without the lock: whoever reads a
  // parameter may come here.
  void send_parameters(Gather& gather, size_t bucket, const at::Tensor& memory);
  void await_parameters(Gather& gather, size_t bucket);

  // What the gradients of coming windows count; weighting.h.
  void set_weighting(const Weighting& weighting) {
    const std::lock_guard lock(mutex_);
    weighting_ = weighting;
    ticks_.exchange().set_weighting(weighting);
  }

  // Parameters of which a gradient that stayed on this rank is still there. Empty in a window that has begun to reduce. The host
  // waits for the device, if there are local gradients.
  std::vector<size_t> never_averaged() const;
  // Parameters whose gradients the last window has averaged.
  std::vector<size_t> averaged() const;

  // Calls back when the gradients of these parameters are final and averaged: inside the backward, on the stream that wrote
  // them.
  void on_averaged(Averaged::Callback callback) {
    const std::lock_guard lock(mutex_);
    averaged_.set(std::move(callback));
  }

  // Note [Layers that write gradients], reduction.h. Called without the lock, after autograd has accumulated a gradient: returns
  // whether the layer has added to the main gradient, and then drops what autograd was given instead.
  using AskLayer = std::function<bool(size_t parameter)>;
  void ask_layers(AskLayer ask) { ask_layer_ = std::move(ask); }

  // A GradScaler has scaled losses by this, whose backward comes next; 0: not known.
  void note_loss_scale(float scale) {
    const std::lock_guard lock(mutex_);
    loss_scale_ = scale;
  }

  // Ends this rank's waits for others, and all further use; it may outlive this object.
  std::shared_ptr<Interruption> interruption() const { return interruption_; }

  // What has happened, and who shall be told.
  Locked<Timeline> timeline() { return {std::unique_lock(mutex_), timeline_}; }
  // What is known of windows and their use of parameters. The same on all ranks, except the order of arrival.
  Locked<const Window> window() const { return {std::unique_lock(mutex_), window_}; }

  Locked<const Buckets> buckets() const { return {std::unique_lock(mutex_), buckets_}; }
  // What this rank's gradients were, up to now.
  Locked<LocalGradients> local_gradients();

  // Which gradients coming windows expect; between two windows.
  void set_expect(Expect expect) {
    const std::lock_guard lock(mutex_);
    check_between_windows("what is expected of gradients can be changed");
    window_.set_expect(expect);
  }
  // as_first: coming windows use the same parameters as the first window that went well on all ranks, and as often. Coming
  // buckets hold only what any rank used then.
  void fix_usage() {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(window_.knows_first(), "fastddp: it is not known yet which parameters are used");
    window_.fix_first();
  }

  // Windows that have ended, well or not: the same number on all ranks.
  size_t windows() {
    const std::lock_guard lock(mutex_);
    notice_failure();
    return window_.ended();
  }

  // Of the gradients that the last window left: the sum of their squares and the number of elements that are not finite, in
  // fp64, on the device of the first bucket. The host does not wait.
  at::Tensor measure() {
    const std::lock_guard lock(mutex_);
    return ticks_.measure(window_);
  }

  // Replaces the buckets, between two windows.
  void set_plan(const Plan& plan);

  // Whether a gradient that comes now may be averaged.
  bool reacts() const { return window_.is_open(); }
  const c10d::ProcessGroup& process_group() const { return *process_group_; }

  // The model's backward has collectives of its own over the same ranks: note [Order among collectives].
  void share_order() {
    const std::lock_guard lock(mutex_);
    reduction_.share_order();
  }

  // The number of this model in its process group, the same on all ranks; 0: ranks do not agree on a number.
  void set_model_number(size_t number) {
    const std::lock_guard lock(mutex_);
    closing_.set_model_number(number);
  }

  // Each rank gets the averages of its own spans only, between two windows: Buckets::become_sharded(). Another plan, or null,
  // ends that. The exchange has to be sharded too.
  void become_sharded(const Sharding* sharding, const std::vector<std::vector<at::Tensor>>& holders,
                      const std::vector<at::Tensor>& notices);

  // `zero_grad` of the wrapper has removed gradients, or set them to zero.
  void forget_sums() {
    const std::lock_guard lock(mutex_);
    shared_sums_.forget();
  }

  void set_exchange(std::shared_ptr<Exchange> exchange);

  // Where the wires of coming exchanges come from; null: ordinary memory. Otherwise wires of a new plan wait for its exchange.
  void use_memory(std::shared_ptr<const RegisteredMemory> memory);

  WindowState state() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) notice_failure();  // if not, another thread is at work here, so nothing has raised
    return window_.state();
  }
  // Why the window has failed; empty if it has not.
  std::string failure() {
    const std::lock_guard lock(mutex_);
    notice_failure();
    return window_.is(WindowState::failed) ? failure_.tell() : "";
  }

  // Parameters whose gradients no longer reach this object, because autograd has dropped the hooks.
  std::vector<size_t> parameters_without_hook() const { return hooks_.lost(buckets_.parameters()); }

  // Whether nobody else has hooks that run after autograd has accumulated a gradient of these parameters.
  bool hooks_are_alone() const { return hooks_.are_alone(); }

  void remove_hooks() { hooks_.remove(); }

 private:
  // Moves the window on. If a new window begins, resets what this object has for the old one.
  void apply(WindowEvent event) {
    if (window_.apply(event)) begin_window();
    timeline_.window(window_);
  }
  void own(Exchange& exchange) {
    exchange.called_under(mutex_);
    exchange.status_is_written_by([&, this](const at::Tensor& room) { closing_.write_status(exchange, room); });
  }
  void begin_window();
  void place_gradients() {
    const c10::AutoGradMode no_grad(false);
    buckets_.move_in(std::exchange(movable_, {}));
    buckets_.place_main_gradients();
  }

  // From a forward to a gradient.
  void on_backward_begin();
  void note_backward();
  void before_gradient(size_t parameter, bool is_defined);
  void begin_with_gradient();
  bool adds_up() const;
  void look_for_skipped_step();
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void on_local_gradient(size_t parameter, bool exclusive);
  void begin_reduction(bool at_outputs = false);

  // The end of a backward.
  void on_backward_end();
  void finish_window();

  // Windows that fail.
  void notice_failure();
  void fail_here(const std::string& what) {
    failure_.happened_here(what, window_.ended() + 1, process_group_->getRank());
    fail();
  }
  void fail() {
    apply(WindowEvent::fail);
    timeline_.happened(What::fails);
  }
  void repair();

  void check_between_windows(const char* what) const;

  const std::shared_ptr<Interruption> interruption_ = std::make_shared<Interruption>();
  mutable std::mutex mutex_;
  Conductor conductor_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  Buckets buckets_;
  Window window_;
  Averaged averaged_;
  Backwards backwards_;
  bool steps_are_seen_ = false;                     // an optimizer of this model has been seen to step
  bool stepped_in_window_ = false;                  // an optimizer has stepped inside this backward
  std::atomic<bool> is_unstepped_{false};           // no optimizer has stepped since the last window
  std::atomic<int> looked_in_{-1};                  // the last backward in which a skipped step was looked for
  std::shared_ptr<const RegisteredMemory> memory_;  // null: ordinary memory
  std::vector<size_t> movable_;                     // parameters whose gradients move into the next exchange's wires
  Weighting weighting_;
  float loss_scale_ = 1.0;
  Timeline timeline_;
  Ticks ticks_;
  SharedSums shared_sums_;
  Reduction reduction_;
  LocalGradients local_;
  Closing closing_;
  Failure failure_;
  AskLayer ask_layer_ = [](size_t) { return false; };
  std::atomic<bool> asks_each_layer_{true};  // no window has ended yet
  GradHooks hooks_;                          // last: they call the members above
};

}  // namespace fastddp
