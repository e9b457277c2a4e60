// Note [Life of a gradient]
// 1. Autograd accumulates into `parameter.grad`; a hook in C++ calls Reducer::on_gradient.   grad_hooks.*
// 2. The parameter's bucket counts down.                                                     bucket.*
// 3. When a bucket and all before it are complete, a tick starts its exchange:               reducer.*
//    pack: gradients -> wire, scaled, one kernel;                                             kernels*.*
//    a collective on the wire.                                                               exchange_*.cpp
// 4. When the collective is done: unpack, wire -> `parameter.grad`, one kernel, or nothing where the gradients are
//    views of the wire.                                                                      exchange_*.cpp
// 5. The engine's final callback finishes what is left; backward returns.                    reducer.*
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bucket.h"
#include "exchange.h"
#include "grad_hooks.h"
#include "ranges.h"
#include "ready_times.h"
#include "sharing.h"
#include "sparse.h"
#include "step_sampler.h"
#include "usage.h"
#include "wait_clock.h"

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
//   reducing -- exception in backward -> failed        partial -- next forward or optimizer step -> failed, with an error
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

  // Before every forward. Repairs after a failed window.
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients. `outputs`: its tensors, by which that backward comes; where
  // it cannot be seen coming, it begins with its first gradient, which may be inside a reentrant checkpoint.
  void arm(const std::vector<at::Tensor>& outputs = {});

  // Of a window that is partial: the parameters without a gradient; and its end, in failure.
  std::vector<size_t> missing() const;
  void give_up();

  // A window in which this rank has nothing to add, while others run one (torch's Join): takes part in its collectives.
  void shadow_window();

  // What gradients of coming windows are multiplied by on this rank; note [The divisor], exchange.h.
  void set_factor(double factor);

  // Calls back when the gradients of these parameters are final and averaged, inside the backward, on the stream on which
  // they were written. The callback may not call this object.
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
  size_t windows() const;

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

  void set_exchange(std::unique_ptr<Exchange> exchange);

  WindowState state() const {
    return state_;
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
  class BackwardGuard;

  void on_backward_begin();
  void notice_end_of_backward();
  void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void on_local_gradient(size_t parameter);
  void begin_reduction();
  void begin_another_reduction();
  void on_synchronised_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive);
  void check_expected(size_t parameter, Usage::Hook hook) const;
  void complete(size_t parameter, bool exclusive);
  void start_complete_buckets();
  void tick();
  void end_tick();
  void finish_arrived();
  void finish_next();
  void on_backward_end();
  void on_backward_raised(size_t backward);
  void give_up_window();
  void abandon_rest(double value);
  void carry_local_gradients();

  // How a window ends; reducer_end.cpp.
  struct Sent {
    at::Tensor wire;
    c10::intrusive_ptr<c10d::Work> work;
  };
  void settle_missing();
  void finish_window();
  bool exchanges_usage() const;
  std::vector<Used> used_here() const;
  Sent start_usage_exchange(const std::vector<Used>& used);
  std::vector<Used> receive_usage(const Sent& sent) const;
  void settle_stand_ins();
  std::vector<Bucket> late_buckets() const;
  void send_late(Bucket& late);
  void receive_late(Bucket& late);
  at::Tensor sparse_gradient(size_t parameter) const;
  void exchange_sparse_gradients();
  void abandon_sparse_gradients(SparseStandIn stand_in);
  void sum_over_ranks(std::vector<at::Tensor>& sparse_gradients, SparseStandIn stand_in);
  void report_averaged_at_end();

  size_t ticks_of_a_window() const;
  template <typename Function>
  void for_later_stages(const Function& function);
  void repair();
  void reset_window();
  std::vector<size_t> without_gradient() const;
  bool backward_runs() const {
    return backward_runs_ && *backward_runs_;
  }
  bool came(size_t parameter) const;
  bool has_bucket(size_t parameter) const;
  bool is_sparse(size_t parameter) const;
  void expect_gradients();
  void check_between_windows(const char* what) const;
  std::string describe(size_t parameter) const;

  mutable std::mutex mutex_;
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
  std::unique_ptr<Exchange> exchange_;
  SideStreams side_streams_;

  Usage usage_;
  double factor_ = 1.0;
  std::function<void(const std::vector<size_t>&)> on_averaged_;
  const std::shared_ptr<WaitClock> wait_clock_ = std::make_shared<WaitClock>();

  // The window.
  std::vector<Arrival> arrivals_;  // by parameter
  size_t ticks_ = 0;               // tick k starts stage 0 of bucket k
  size_t finished_buckets_ = 0;
  std::thread::id armed_in_;
  bool is_shared_ = false;        // note [Shared parameters], sharing.h
  bool waits_for_end_ = false;    // note [Order among collectives], sharing.h
  bool arms_by_outputs_ = false;  // whether a backward that comes by the outputs of the last forward is noticed
  bool usage_is_sent_ = false;
  bool sparse_is_sent_ = false;

  StepSampler sampler_;
  Span step_{"step"};          // from a window's first forward to the next one's
  bool step_is_open_ = false;  // a forward of the window that comes, or has come, has been
  Span window_{"window"};      // from the first gradient that is synchronised to the end of its backward

  std::shared_ptr<std::atomic<bool>> backward_runs_;  // the one that was noticed last; null: it is over in any case
  size_t backwards_ = 0;                              // that synchronised, or were to

  std::vector<size_t> arrival_order_;  // of the first window
  ReadyTimes ready_times_;
  size_t windows_ = 0;  // that have ended, well or not

  GradHooks hooks_;  // last: they call the members above
};

}  // namespace fastddp
