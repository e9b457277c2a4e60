// Note [Life of a gradient]
// 1. Autograd accumulates into `parameter.grad`; a hook in C++ calls Reducer::on_gradient.               autograd/
// 2. What is expected of the parameter's bucket counts down.                                             window/, bucket/
// 3. When a bucket and all before it are complete, a tick of the exchange begins with it:                reducer/, pipeline/
//    encode: gradients -> wire, scaled, one kernel (pack);                                                codec/, pack/
//    collectives on the wire.                                                                             transport/
// 4. When the last collective is done: decode, wire -> `parameter.grad`, one kernel (unpack), or nothing
//    where the gradients are views of the wire.                                                           codec/, pack/
// 5. The engine's final callback finishes what is left; backward returns.                                reducer/
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/backward.h"
#include "autograd/grad_hooks.h"
#include "bucket/bucket.h"
#include "observe/ranges.h"
#include "observe/ready_times.h"
#include "observe/step_sampler.h"
#include "observe/wait_clock.h"
#include "pipeline/exchange.h"
#include "pipeline/user_code.h"
#include "reducer/sharing.h"
#include "transport/sparse.h"
#include "window/status.h"
#include "window/usage.h"

namespace fastddp {

// Note [States of a window]
// A window is all backward passes since the last synchronisation.
//
//   idle          no gradient since the last synchronisation
//   accumulating  gradients came, under no_sync or without a forward of the wrapped model: they stay local
//   armed         a forward ran that asked for synchronisation; the next gradient begins it
//   reducing      inside a backward that synchronises
//   partial       such a backward ended, some parameters got no gradient yet; another backward may bring them
//   finished      all exchanges are done; the next forward opens a new window
//   failed        the window cannot be completed; the next forward repairs (note [A window that fails], exchange.h)
//
//   idle, finished -- gradient -> accumulating
//   idle, accumulating, finished -- forward that syncs -> armed          finished -- any forward -> idle
//   armed, partial -- gradient -> reducing -- end of backward -> finished | partial
//   armed, reducing, partial -- exception in backward, noticed by whoever comes next (note [A backward that raises], backward.h)
//     -> failed
//   reducing -- end of backward, another rank has failed (note [Status of a window], window/status.h) -> failed, with an error
//   partial -- next forward or optimizer step -> failed, with an error
//   failed -- next forward -> idle
//
// Where the end of a backward settles its window (note [Expected gradients], usage.h) there is no `partial`, and another
// backward over a forward that asked for synchronisation is another window: finished -- backward, gradient -> reducing.
// That is right for gradients, since the mean of (an old mean + what is new) is the old mean + the mean of what is new, and
// it depends on nothing but the number of backwards, which is the same on all ranks where their use of parameters is not.
enum class WindowState { idle, accumulating, armed, reducing, partial, finished, failed };

const char* to_string(WindowState state);

// Note [Late gradients]
// When a window settles, ranks exchange which parameters they used. A gradient nobody has is left alone. One that came to
// some rank behind its bucket is completed: what the bucket lacked is averaged in one more exchange, of these parameters
// only, which all ranks know of from that map, and added.

// Conducts the exchange of gradients of one model: owns the buckets, their order, and the moment.
// All methods may be called with or without the GIL; none needs it.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `plan`: the parameters of each bucket, in the order of collectives; each parameter is in exactly one, except for those
  // that no rank uses, once that is known, and the `sparse` ones, whose gradients are sparse tensors (sparse.h).
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<std::vector<size_t>> plan,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group, bool gradient_as_bucket_view,
          Expect expect = Expect::all, std::vector<size_t> sparse = {});
  // In the middle of a window, too.
  ~Reducer();
  // Before every forward. Repairs after a failed window, with a warning that says what had failed. Waits for a backward that
  // runs in another thread, unless this forward is one without gradients, which changes nothing.
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients. `outputs`: its tensors, by which that backward comes; where
  // it cannot be seen coming, it begins with its first gradient, which may be inside a reentrant checkpoint.
  void arm(const std::vector<at::Tensor>& outputs = {});

  // Of a window that is partial: the parameters without a gradient; and its end, in failure.
  std::vector<size_t> missing() const;
  void give_up();

  // A window in which this rank has nothing to add, while others run one (torch's Join): takes part in its collectives.
  void shadow_window();

  // What the gradients of coming windows count; average.h.
  void set_average(const Average& average);

  // Calls back when the gradients of these parameters are final and averaged, inside the backward, on the stream on which
  // they were written.
  void on_averaged(std::function<void(const std::vector<size_t>& parameters)> callback);

  // Since when backward waits for other ranks; it may outlive this object.
  std::shared_ptr<const WaitClock> wait_clock() const {
    return wait_clock_;
  }

  // Indices of parameters in the order in which the gradients of the first window came; empty until it has ended.
  std::vector<size_t> arrival_order() const;

  // When gradients became ready in each window that has ended well since the times are taken; ready_times.h.
  void take_ready_times(bool taking);
  std::vector<std::vector<double>> ready_times() const;

  // What the gradients of coming windows are expected to be; between two windows.
  void set_expect(Expect expect);
  // as_first: whether a window has gone well on all ranks; the parameters that any of them used in it; and that buckets
  // follow which hold these only, and windows that use them as often as that one did. The same on all ranks.
  bool knows_usage() const;
  std::vector<size_t> used_parameters() const;
  void fix_usage();

  // Windows that have ended, well or not: the same number on all ranks.
  size_t windows();

  // Of the gradients that the last window left: the sum of their squares and how many elements are not finite, fp64, on
  // the device of the first bucket. The host does not wait for it.
  at::Tensor measure();

  // Replaces the buckets, between two windows.
  void set_plan(std::vector<std::vector<size_t>> plan);

  // Whether a gradient that comes now may be averaged.
  bool reacts() const {
    return state_ == WindowState::armed || state_ == WindowState::partial || state_ == WindowState::reducing;
  }
  const c10d::ProcessGroup& process_group() const {
    return *process_group_;
  }

  // The backward of the model has collectives of its own over the same ranks: note [Order among collectives].
  void share_order();

  // Of every n-th step: when things happened; 0: of none. StepSampler::last().
  void sample_every(size_t steps);
  std::optional<StepTimes> sampled() const;

  void set_exchange(std::shared_ptr<Exchange> exchange);

  WindowState state();
  // Of a window that has failed: why.
  std::string failure();

  // Those whose gradients come by no more, because autograd has forgotten the hooks.
  std::vector<size_t> parameters_without_hook() const {
    return hooks_.lost(parameters_);
  }

  void remove_hooks() {
    hooks_.remove();
  }

 private:
  // What this window has brought for one parameter.
  enum class Arrival : char {
    none,
    local,    // in a backward that did not synchronise
    ready,    // in one that did
    carried,  // local, and synchronised because the last backward brought nothing more
  };
  struct Place {
    size_t bucket;
    size_t member;
  };
  void on_backward_begin();
  void note_backward();
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void on_local_gradient(size_t parameter);
  void begin_reduction();
  void begin_another_reduction();
  void on_synchronised_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void check_expected(size_t parameter, Usage::Hook hook) const;
  void complete(size_t parameter, bool exclusive);
  void start_complete_buckets();
  void tick();
  void finish_arrived();
  void finish_next();
  void on_backward_end();
  void carry_local_gradients();

  // Windows that fail; reducer_failure.cpp.
  enum class Unsaid { nothing, warning, error };
  void notice_failure();
  void fail_here(const std::string& what);
  void fail_elsewhere(const std::string& what, size_t window);
  void end_failed_window();
  void let_backward_elsewhere_end();
  void repair();
  void void_gradients();
  void abandon_rest(double value);
  void abandon_what_follows_status(SparseStandIn stand_in, double value);

  // How a window ends; reducer_end.cpp.
  void settle_missing();
  void finish_window();
  c10d::ProcessGroup* status_group() const;
  bool exchanges_status() const;
  bool status_has_used() const;
  bool waits_for_status() const;
  void send_status(bool failed);
  void host_waits_for_status();
  void receive_status();
  std::vector<Used> used_here() const;
  void settle_stand_ins();
  std::vector<Bucket> late_buckets() const;
  void send_late(Bucket& late);
  void receive_late(Bucket& late);
  void check_sparse_gradients() const;
  at::Tensor sparse_gradient(size_t parameter) const;
  void exchange_sparse_gradients();
  void sum_over_ranks(std::vector<at::Tensor>& sparse_gradients, SparseStandIn stand_in);
  void report_averaged(const std::vector<size_t>& parameters);
  void report_averaged_at_end();

  size_t ticks_of_a_window() const;
  void reset_window();
  std::vector<size_t> without_gradient() const;
  bool came(size_t parameter) const;
  bool has_bucket(size_t parameter) const;
  bool is_sparse(size_t parameter) const;
  void expect_gradients();
  void check_between_windows(const char* what) const;
  std::string describe(size_t parameter) const;

  mutable std::mutex mutex_;
  Conductor conductor_;
  std::atomic<WindowState> state_{WindowState::idle};

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const bool gradient_as_bucket_view_;

  const std::vector<size_t> sparse_;  // parameters
  const Held held_;
  bool shares_order_ = false;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
  std::shared_ptr<Exchange> exchange_;
  SideStreams side_streams_;

  Usage usage_;
  Average average_;
  std::function<void(const std::vector<size_t>&)> on_averaged_;
  const std::shared_ptr<WaitClock> wait_clock_ = std::make_shared<WaitClock>();

  // The window.
  std::vector<Arrival> arrivals_;  // by parameter
  size_t ticks_ = 0;               // note [Ticks], exchange.h
  size_t finished_buckets_ = 0;
  bool is_shared_ = false;        // note [Shared parameters], sharing.h
  bool waits_for_end_ = false;    // note [Order among collectives], sharing.h
  bool arms_by_outputs_ = false;  // whether a backward that comes by the outputs of the last forward is noticed
  size_t forwards_ = 0;           // that asked for synchronisation
  bool lost_a_backward_ = false;  // maybe: one has run since the last that this reducer knew of
  WindowStatus status_;
  bool status_is_received_ = false;
  bool sparse_is_sent_ = false;
  size_t late_sent_ = 0;
  std::string failure_;  // of a window that has failed: what and where
  Unsaid unsaid_ = Unsaid::nothing;

  StepSampler sampler_;
  Span step_{"step"};          // from a window's first forward to the next one's
  bool step_is_open_ = false;  // a forward of the window that comes, or has come, has been
  Span window_{"window"};      // from the first gradient that is synchronised to the end of its backward

  Backward backward_;       // of the open window, the one that came last
  int last_backward_ = -1;  // the engine's number of the last one that was noted

  std::vector<size_t> arrival_order_;  // of the first window
  ReadyTimes ready_times_;
  size_t windows_ = 0;  // that have ended, well or not

  GradHooks hooks_;  // last: they call the members above
};

}  // namespace fastddp
