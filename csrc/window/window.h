// A window: its state, the gradients it expects, and those that have come. Numbers only: no tensors, no ranks, no time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastddp {

// Note [States of a window]
// A window is all backward passes since the last synchronisation.
//
//   idle          no gradient since the last synchronisation
//   accumulating  gradients came under no_sync, or without a forward of the wrapped model: they stay local
//   armed         a forward asked for synchronisation; the next gradient begins it
//   reducing      inside a backward that synchronises
//   partial       such a backward ended, but some parameters have no gradient yet; another backward may bring them
//   finished      all exchanges are done; the next forward opens a new window
//   failed        the window cannot be completed; the next forward repairs (note [A window that fails], trip/driver.h)
//
// The table in window.cpp says which events may happen in which state, and which state follows. What an event means:
enum class WindowState { idle, accumulating, armed, reducing, partial, finished, failed };
enum class WindowEvent {
  forward,         // a forward with gradients; after a finished window it begins the next one
  arm,             // the forward asked for synchronisation
  local_gradient,  // a gradient stays on this rank; after a finished window it belongs to the next one
  reduce,          // the first gradient of a backward that synchronises; after a finished window it begins another window over
                   // the same forward: note [Expected gradients]
  lack,            // the backward has ended, and gradients are missing
  finish,          // all exchanges are done
  fail,            // backward raised, here or on another rank; whoever comes next notices it
  repair,          // this rank has done its part in the exchanges that its failed window had left
  stand_aside,     // others had a window in which this rank had nothing to add
  miss,            // the backward that the forward asked for has raised before it reached the model
};

const char* to_string(WindowState state);

// Note [Expected gradients]
// A bucket starts to travel when every gradient that it waits for is final. A parameter's gradient is final when its hook
// has run as often as expected: once, or once for each reentrant checkpoint that uses the parameter.
//
//   all       every parameter, once
//   as_last   the parameters of this rank's last window (find_unused_parameters)
//   as_first  the parameters of the first window (static_graph); parameters that no rank used then are in no bucket
//
// While nothing is known, buckets start when backward ends. A backward may use other parameters than the last one did. Where
// that is allowed, the end of a backward ends its window, and what has not come is no longer waited for. A gradient
// that its bucket did not wait for travels late (note [Late gradients], closing.h). Another backward over the same forward is
// another window. Gradients stay right: the mean of (old mean + new gradient) is the old mean + the mean of the new gradients.
// And ranks stay in step: the number of backwards is the same on all of them, even where their use of parameters is not.
enum class Expect { all, as_last, as_first };

// How one window used a parameter. Over ranks the greatest counts.
enum class Used : uint8_t {
  no = 0,
  yes = 1,
  late = 2,  // used, and its gradient has to travel late
};

// Whether a window has brought a parameter's gradient.
enum class Arrival : uint8_t {
  none,
  local,               // in a backward that did not synchronise
  synchronised,        // in a backward that did
  local_synchronised,  // local, and averaged as it was: the backward that synchronised brought nothing more
};

// The parameters that are as asked for, of the first so many.
template <typename Are>
std::vector<size_t> those(size_t parameters, const Are& are) {
  std::vector<size_t> found;
  for (size_t parameter = 0; parameter < parameters; ++parameter) {
    if (are(parameter)) found.push_back(parameter);
  }
  return found;
}

class Window {
 public:
  Window(size_t parameters, Expect expect);

  // Any thread may call it without the reducer's lock.
  WindowState state() const { return state_; }
  bool is(WindowState state) const { return state_ == state; }
  // Whether a gradient that comes now may be averaged.
  bool is_open() const {
    const auto state = state_.load();
    return state == WindowState::armed || state == WindowState::reducing || state == WindowState::partial;
  }
  // Whether a backward has begun to reduce, and the window has neither ended nor failed.
  bool has_begun() const { return is(WindowState::reducing) || is(WindowState::partial); }
  // Whether a backward that comes now may begin to reduce.
  bool may_begin() const;

  // Returns whether the event begins a new window, which forgets the gradients of the one before.
  // Raises std::logic_error where the event cannot happen.
  bool apply(WindowEvent event);

  // How many windows have ended, well or not: the same number on all ranks.
  size_t ended() const { return ended_; }
  // Whether a failed window was open: then this rank still owes others the exchanges that it has not started.
  bool owes() const { return owes_; }

  // Both between two windows. `buckets`: the parameters of each. set_expect() forgets what was learned.
  void set_buckets(const std::vector<std::vector<size_t>>& buckets);
  void set_expect(Expect expect);

  // What is known of windows, and from another window object: for a model that goes on with other ranks. Numbers, so that ranks
  // can send them. Taken over before the first window.
  std::vector<int64_t> learned() const;
  void go_on_from(const std::vector<int64_t>& learned);

  // ---- What is expected.

  // Whether every window has to bring every gradient.
  bool expects_all() const { return expect_ == Expect::all; }
  // Whether the end of a backward may end its window before every parameter has brought a gradient in that backward.
  bool may_end_early() const {
    const auto is_local = [](const Parameter& parameter) { return parameter.arrival == Arrival::local; };
    return ends_with_backward() || std::ranges::any_of(parameters_, is_local);
  }
  // Whether nothing is known yet.
  bool is_learning() const { return learning_; }
  // Whether one window decides for all coming ones.
  bool learns_once() const { return expect_ == Expect::as_first; }
  // Whether the end of a backward ends its window.
  bool ends_with_backward() const { return expect_ == Expect::as_last || learning_; }
  bool waits_for(size_t parameter) const { return !learning_ && parameters_[parameter].expected > 0; }

  // ---- What has come.

  // What a hook means that ran in a backward that synchronises. A hook that brings no gradient is at most the last.
  enum class Hook { nothing, last, unexpected, too_many };
  Hook count_hook(size_t parameter, bool is_gradient) {
    auto& record = parameters_[parameter];
    ++record.hooks;
    if (is_gradient) {
      if (ended_ == 0 && record.arrival != Arrival::synchronised) arrival_order_.push_back(parameter);
      record.arrival = Arrival::synchronised;
    }
    if (!waits_for(parameter)) return is_gradient ? Hook::unexpected : Hook::nothing;
    if (record.hooks == record.expected) return Hook::last;
    return is_gradient && record.hooks > record.expected ? Hook::too_many : Hook::nothing;
  }

  Arrival arrival(size_t parameter) const { return parameters_[parameter].arrival; }
  void note_local(size_t parameter) {
    auto& arrival = parameters_[parameter].arrival;
    if (arrival == Arrival::none) arrival = Arrival::local;
  }
  // The local gradient has been removed, or set to zero.
  void forget_local(size_t parameter) { parameters_[parameter].arrival = Arrival::none; }
  // A local gradient is averaged as it is.
  void synchronise_local(size_t parameter) { parameters_[parameter].arrival = Arrival::local_synchronised; }

  // Whether the parameter's next hook is the last one that its bucket waits for.
  bool comes_last_next(size_t parameter) const {
    return waits_for(parameter) && parameters_[parameter].hooks + 1 == parameters_[parameter].expected;
  }
  // Whether the window waits for the parameter, and its gradient is not final.
  bool is_missing(size_t parameter) const {
    return waits_for(parameter) && parameters_[parameter].hooks < parameters_[parameter].expected;
  }

  // The parameter's bucket no longer waits for its gradient. Returns whether the bucket now waits for none.
  bool count_down(size_t parameter) { return --missing_[parameters_[parameter].bucket] == 0; }
  bool is_complete(size_t bucket) const { return bucket < missing_.size() && missing_[bucket] == 0; }
  // No bucket waits for a gradient from now on.
  void stop_waiting() { std::ranges::fill(missing_, 0); }

  // Parameters in the order in which the gradients of the first window came; empty until it has ended.
  std::vector<size_t> arrival_order() const { return ended_ > 0 ? arrival_order_ : std::vector<size_t>{}; }

  // ---- What was used.

  // The window has ended, on this rank without a failure. Its gradients are those expected from now on. `used`: by any rank.
  void learn(const std::vector<Used>& used);
  // The same for a window in which this rank had no part: only `used` is learned.
  void learn_from_others(const std::vector<Used>& used);

  // In the last window; as_first, once that is fixed: in the first step.
  Used used(size_t parameter) const { return parameters_[parameter].used; }
  // as_first: in any window that was learned from; else in the last one.
  bool ever_used(size_t parameter) const { return parameters_[parameter].ever_used != Used::no; }
  std::vector<size_t> ever_used() const {
    return those(parameters_.size(), [this](size_t parameter) { return ever_used(parameter); });
  }
  // as_first: whether a window went well on all ranks.
  bool knows_first() const { return knows_first_; }
  // as_first: coming windows expect the gradients of the windows that were learned from.
  void fix_first() {
    if (!learning_) return;
    for (auto& parameter : parameters_) {
      parameter.expected = parameter.learned;
      parameter.used = parameter.ever_used;
    }
    learning_ = false;
    count_missing();
  }

 private:
  struct Parameter {
    Arrival arrival = Arrival::none;
    uint32_t hooks = 0;     // hooks that have run in this window, in backwards that synchronise
    uint32_t expected = 1;  // hooks expected; 0: the window does not wait for the parameter
    uint32_t learned = 0;   // hooks; as_last: the most ever; as_first: the sum over backwards of the first step
    Used used = Used::no;
    Used ever_used = Used::no;
    size_t bucket = 0;  // the number of buckets: in none
  };
  void forget_what_came();
  void count_missing();

  std::atomic<WindowState> state_{WindowState::idle};
  bool owes_ = false;
  size_t ended_ = 0;

  Expect expect_;
  bool learning_;
  bool knows_first_ = false;
  std::vector<Parameter> parameters_;
  std::vector<size_t> missing_;  // by bucket: how many gradients it still waits for
  std::vector<size_t> arrival_order_;
};

}  // namespace fastddp
