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
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bucket.h"
#include "exchange.h"
#include "grad_hooks.h"

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
enum class WindowState { idle, accumulating, armed, reducing, partial, finished, failed };

const char* to_string(WindowState state);

// Conducts the exchange of gradients of one model: owns the buckets, their order, and the moment.
// All methods may be called with or without the GIL; none needs it.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // `plan`: the parameters of each bucket, in the order of collectives; each parameter is in exactly one.
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<std::vector<size_t>> plan,
          c10::intrusive_ptr<c10d::ProcessGroup> process_group, bool gradient_as_bucket_view);

  // Before every forward. Repairs after a failed window; raises if gradients of the last one are missing and this
  // forward would begin the next (`grad_enabled`).
  void begin_forward(bool grad_enabled);

  // After a forward whose backward shall synchronise gradients.
  void arm();

  // Before an optimizer uses the gradients: raises unless they are complete.
  void check_complete();

  // Indices of parameters in the order in which the gradients of the first window came; empty until it has ended.
  std::vector<size_t> arrival_order() const;

  // Windows that have ended, well or not: the same number on all ranks.
  size_t windows() const;

  // Of the gradients that the last window left: the sum of their squares and how many elements are not finite, fp64, on
  // the device of the first bucket. The host does not wait for it.
  at::Tensor measure();

  // Replaces the buckets, between two windows.
  void set_plan(std::vector<std::vector<size_t>> plan);

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

  void on_gradient(size_t parameter, bool exclusive);
  void on_local_gradient(size_t parameter);
  void begin_reduction();
  void mark_ready(size_t parameter, Arrival arrival, bool exclusive);
  void tick();
  void end_tick();
  void finish_arrived();
  void finish_next();
  void on_backward_end();
  void on_backward_raised(size_t backward);
  void give_up_window();
  void finish_window();
  size_t ticks_of_a_window() const;
  template <typename Function>
  void for_later_stages(const Function& function);
  void repair();
  [[noreturn]] void fail_with_missing();
  void reset_window();
  std::vector<size_t> without_gradient() const;
  std::string describe(size_t parameter) const;

  mutable std::mutex mutex_;
  std::atomic<WindowState> state_{WindowState::idle};

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const bool gradient_as_bucket_view_;

  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
  std::unique_ptr<Exchange> exchange_;
  SideStreams side_streams_;

  // The window.
  std::vector<Arrival> arrivals_;  // by parameter
  size_t ticks_ = 0;               // tick k starts stage 0 of bucket k
  size_t finished_buckets_ = 0;

  size_t backwards_ = 0;  // that synchronised, or were to

  std::vector<size_t> arrival_order_;  // of the first window
  size_t windows_ = 0;                 // that have ended, well or not

  GradHooks hooks_;  // last: they call the members above
};

}  // namespace fastddp
