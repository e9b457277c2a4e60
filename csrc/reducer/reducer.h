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
#include "errors/see.h"
#include "observe/timeline.h"
#include "reducer/averaged.h"
#include "reducer/closing.h"
#include "reducer/errors.h"
#include "reducer/layers.h"
#include "reducer/local_gradients.h"
#include "reducer/reduction.h"
#include "reducer/steps.h"
#include "transport/gather.h"
#include "trip/driver.h"
#include "waits/interruption.h"
#include "window/window.h"

namespace fastddp {

// Note [Lost connections]
// When a connection to another rank is lost, backward raises. A manager of replicas (fastddp/elastic/) refuses that step anyway,
// and its users' loops catch nothing. So it may ask to be told instead: the window then fails without an error, here and where
// another rank says that its window failed. The model can go on only in another group.
struct Lost {
  size_t window;                 // its number, from 0
  std::optional<size_t> bucket;  // whose collective it was; none: what follows the buckets
  std::string what;
};

// Owns the parts and decides when each of them works; a part decides how.
// All methods may be called with or without the GIL; none needs it.
class Reducer : public Receiver, public std::enable_shared_from_this<Reducer> {
 public:
  // `plan`: the parameters of each bucket, in the order of collectives. Each parameter is in exactly one bucket, except those
  // known to be used by no rank, and the `sparse` ones, whose gradients are sparse tensors (sparse.h).
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Plan& plan,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group, GradientForm form, Expect expect = Expect::all,
          std::vector<size_t> sparse = {}, const std::vector<int64_t>& learned = {});
  // Also in the middle of a window.
  ~Reducer() override;
  // Hears of gradients from now on; called once.
  void listen() { hooks_.begin(weak_from_this()); }
  // Ends the use of this object without a wait for other ranks; waits of other threads end. `group_stays`: it goes on with other
  // ranks. Returns whether an open or failed window is void now; what codecs remember is as before its step.
  bool leave(bool group_stays);
  // Note [Lost connections]. Called without the lock.
  void on_lost(std::function<void(const Lost&)> tell) { tell_lost_ = std::move(tell); }
  const std::optional<Lost>& lost() const { return lost_; }
  // Before every forward. Repairs after a failed window, with a warning that says what failed. Waits for a backward that runs
  // in another thread; a forward without gradients changes nothing, and does not wait.
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients. `outputs`: the forward's tensors, where that backward begins. A
  // backward that reaches none of them begins before its first gradient, which may be inside a reentrant checkpoint.
  void arm(const std::vector<at::Tensor>& outputs = {});

  // Both for a module without a wrapper: note [Windows without a forward], reducer.cpp. `open` is called without the lock.
  void opens_by(std::function<void()> open) { open_ = std::move(open); }
  void set_local(bool is_local) { is_local_ = is_local; }
  // This rank may be a step behind the others: its optimizer steps, and a backward since its last step has brought nothing. Ranks
  // compare how often that was (note [Status of a window], window/status.h).
  void note_missed_step() { ++missed_; }
  // The same if a window waits for a backward that has raised before it reached the model. It waits no longer.
  void backward_raised() override;

  // A compiled backward has computed this parameter's gradient, and goes on: note [Handed over], grad_hooks.h.
  void hand_over(size_t parameter, const at::Tensor& gradient);
  // The parameters for which that has been called.
  std::vector<size_t> handed_over() const {
    return those(were_handed_over_.size(), [this](size_t parameter) { return were_handed_over_[parameter].load(); });
  }
  // Whether an optimizer steps a parameter as soon as its gradient is averaged. A compiled backward that goes on may read it.
  bool steps_inside_backward() {
    const std::lock_guard lock(mutex_);
    return averaged_.calls() || driver_.way()->steps_optimizers;
  }

  // Makes a partial window fail.
  void give_up() {
    const std::lock_guard lock(mutex_);
    if (window_.is(WindowState::partial)) fail_here("left parameters without a gradient");
  }

  // Repairs a window that failed, as the next forward would, unless a backward runs this. Called before parameters and gradients
  // move for another way.
  void repair_if_failed() {
    const std::lock_guard lock(mutex_);
    if (Backwards::is_inside_one()) return;
    notice_failure();
    if (window_.is(WindowState::failed)) repair();
    steps_.look_for_skipped();
  }

  // Takes part in the collectives of a window of other ranks, in which this rank has nothing to add (torch's Join).
  void shadow_window();

  // An optimizer of the model begins or ends its step: note [Steps], steps.h.
  void note_optimizer(bool begins) {
    const std::lock_guard lock(mutex_);
    const bool is_inside = begins && backwards_.last().runs();
    TORCH_CHECK(!is_inside || !hooks_.any_came_early_in(backwards_.last_number()), kStepsInCompiledBackward, see("FD050"));
    timeline_.happened(begins ? What::optimizer : What::after_optimizer);
    if (!begins) steps_.optimizer_stepped();
  }
  // No optimizer steps with the gradients of this step. `only_if`: one element, on any device; if it is 0, one does step.
  void discard_step(at::Tensor only_if) {
    const std::lock_guard lock(mutex_);
    notice_failure();
    if (window_.is(WindowState::failed)) return;  // repair() undoes it
    TORCH_CHECK(!window_.has_begun() && !reduction_.is_conducted(),
                "fastddp: a step can be discarded after its backward only, not while its gradients travel", see("FD014"));
    steps_.discard(std::move(only_if));
  }

  // Sends this rank's parameters of a bucket, and waits for those of the others (gather.h). Without the lock: whoever reads a
  // parameter may come here.
  void send_parameters(Gather& gather, size_t bucket, const at::Tensor& memory);
  void await_parameters(Gather& gather, size_t bucket);

  // What the gradients of coming windows count; weighting.h.
  void set_weighting(const Weighting& weighting) {
    const std::lock_guard lock(mutex_);
    driver_.set_weighting(weighting);
  }

  // Note [Layers that write gradients], layers.h.
  void ask_layers(Layers::Ask ask) { reduction_.layers().ask_by(std::move(ask)); }

  // A GradScaler has scaled losses by this, whose backward comes next; 0: not known.
  void note_loss_scale(float scale) {
    const std::lock_guard lock(mutex_);
    local_.note_loss_scale(scale);
  }

  // Ends this rank's waits for others, and all further use; it may outlive this object.
  std::shared_ptr<Interruption> interruption() const { return interruption_; }

  // What has been observed, and what shall be.
  Locked<Timeline> timeline() { return {std::unique_lock(mutex_), timeline_}; }
  // What is known of windows and their use of parameters. The same on all ranks, except the order of arrival.
  Locked<const Window> window() const { return {std::unique_lock(mutex_), window_}; }

  Locked<const Buckets> buckets() const { return {std::unique_lock(mutex_), buckets_}; }
  // Which gradients are averaged, and who is told.
  Locked<Averaged> averaged() { return {std::unique_lock(mutex_), averaged_}; }
  Locked<Reduction> reduction() { return {std::unique_lock(mutex_), reduction_}; }
  // What this rank's gradients were, up to now.
  Locked<LocalGradients> local_gradients() {
    std::unique_lock lock(mutex_);
    notice_failure();
    local_.notice_late(closing_);
    return {std::move(lock), local_};
  }

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
    TORCH_CHECK(window_.is(WindowState::finished),
                "fastddp: the norm of gradients is known between the backward that synchronises them and the next forward, "
                "not while the window is ",
                to_string(window_.state()), ".");
    return buckets_.measure();
  }

  // Whether a gradient that comes now may be averaged.
  bool reacts() const { return window_.is_open(); }
  const c10d::ProcessGroup& process_group() const { return *process_group_; }

  // The number of this model in its process group, the same on all ranks; 0: ranks do not agree on a number.
  void set_model_number(size_t number) {
    const std::lock_guard lock(mutex_);
    closing_.set_model_number(number);
    driver_.set_model_number(number);
  }

  // How gradients travel from the next window on, and in which buckets; none: in those that there are. If it raises, nothing has
  // changed: note [All or nothing], bucket/bucket.h.
  void set_way(std::shared_ptr<Way> way, const std::optional<Plan>& plan = std::nullopt);

  // Where the wires of coming ways come from; null: ordinary memory.
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
    return window_.is(WindowState::failed) ? closing_.failure().tell() : "";
  }

  // Parameters whose gradients no longer reach this object, because autograd has dropped the hooks.
  std::vector<size_t> parameters_without_hook() const { return hooks_.lost(buckets_.parameters()); }

  // Whether nobody else has hooks that run after autograd has accumulated a gradient of these parameters.
  bool hooks_are_alone() const { return hooks_.are_alone(); }

  void remove_hooks() { hooks_.end(); }

  void before_gradient(size_t parameter, bool is_defined) override;
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) override;

 private:
  // Moves the window on. If a new window begins, resets what this object has for the old one.
  void apply(WindowEvent event) {
    if (window_.apply(event)) begin_window();
    timeline_.window(static_cast<uint32_t>(window_.state()), window_.ended());
  }
  void begin_window() {
    buckets_.reset();
    driver_.begin_window();
    local_.reset();
    closing_.reset();
    reduction_.layers().reset();
    timeline_.happened(What::window);
  }
  // From a forward to a gradient.
  void on_backward_begin();
  void note_backward();
  void open_without_forward();
  void begin_with_gradient();
  bool may_share_memory(size_t parameter, const at::Tensor& gradient) const;
  void on_local_gradient(size_t parameter, bool exclusive);
  void begin_reduction(bool at_outputs = false);

  // The end of a backward.
  void on_backward_end();
  void finish_window();

  // Windows that fail.
  template <typename Part>
  void may_lose(const Part& part);
  void note_lost(const std::string& what);
  void lose();
  bool leave_behind(bool group_stays, bool was_interrupted);
  void notice_failure();
  void fail_here(const std::string& what) {
    closing_.failure().happened_here(what, window_.ended());
    fail();
  }
  void fail() {
    apply(WindowEvent::fail);
    timeline_.happened(What::fails);
  }
  void repair();

  void check_between_windows(const char* what) const;
  void tell_plan();

  const std::shared_ptr<Interruption> interruption_ = std::make_shared<Interruption>();
  mutable std::mutex mutex_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  Buckets buckets_;
  Window window_;
  Averaged averaged_;
  Backwards backwards_;
  Timeline timeline_;
  Driver driver_;
  Steps steps_;
  Reduction reduction_;
  LocalGradients local_;
  Closing closing_;
  std::vector<std::atomic<bool>> were_handed_over_;  // by parameter
  std::function<void()> open_;                       // empty: only forwards open windows
  std::atomic<bool> is_local_{false};                // gradients stay on this rank, whatever a forward asked for
  std::atomic<int> asked_in_{-1};                    // the number of the last backward that has asked for a window
  std::mutex opening_;
  std::atomic<size_t> missed_{0};  // since the last window: note_missed_step()
  std::function<void(const Lost&)> tell_lost_;
  std::optional<Lost> lost_;
  bool has_left_ = false;  // leave() was called
  GradHooks hooks_;
};

}  // namespace fastddp
