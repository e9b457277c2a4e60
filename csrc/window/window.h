// A window: its state, what it expects of each parameter, and what has come. Numbers only: no tensors, no ranks, no time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

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
// What may happen in which state, and what follows, is the table in window.cpp. What an event means:
enum class WindowState { idle, accumulating, armed, reducing, partial, finished, failed };
enum class WindowEvent {
  forward,         // with gradients: after a window that has finished, the next one
  arm,             // the forward asked for synchronisation
  local_gradient,  // one that stays on this rank; after a window that has finished it belongs to the next one
  reduce,       // the first gradient of a backward that synchronises. After a window that has finished this is another
                // window over the same forward: note [Expected gradients]
  lack,         // the backward has ended, gradients are missing
  finish,       // all exchanges are done
  fail,         // an exception in backward, here or on another rank, noticed by whoever comes next
  repair,       // this rank has made up for what a failed window owed others
  stand_aside,  // others had a window in which this rank had nothing to add
};

const char* to_string(WindowState state);
const char* to_string(WindowEvent event);

// Note [Expected gradients]
// A bucket starts to travel when every gradient that it waits for is final. A parameter's gradient is final when its hook
// has run as often as expected: once, or once for each reentrant checkpoint that uses the parameter.
//
//   all       every parameter, once
//   as_last   the parameters of this rank's last window (find_unused_parameters)
//   as_first  the parameters of the first one (static_graph); what no rank used then is in no bucket
//
// As long as nothing is known, buckets start when backward ends. A backward that was expected to be as the last one may
// differ. Where that is allowed, the end of a backward ends its window, whatever came: what did not come is not waited for any
// more, what came behind its bucket travels late (note [Late gradients], closing.h), and another backward over a forward that
// asked for synchronisation is another window. That is right for gradients: the mean of (an old mean + what is new) is the old
// mean + the mean of what is new. And it depends on the number of backwards only, which is the same on all ranks where their
// use of parameters is not.
enum class Expect { all, as_last, as_first };

// Of one parameter in one window. Over ranks the greatest counts.
enum class Used : uint8_t {
  no = 0,
  yes = 1,
  late = 2,  // and its gradient came behind its bucket
};

// What a window has brought for one parameter.
enum class Arrival : uint8_t {
  none,
  local,               // in a backward that did not synchronise
  synchronised,        // in one that did
  local_synchronised,  // local, and averaged because the backward that synchronised brought nothing more
};

class Window {
 public:
  Window(size_t parameters, Expect expect);

  // By any thread, without the reducer's lock.
  WindowState state() const { return state_; }
  bool is(WindowState state) const { return state_ == state; }
  // Whether a gradient that comes now may be averaged.
  bool is_open() const;
  // Whether a backward that comes now may begin to reduce.
  bool may_begin() const;

  // Whether a new window begins with it: what had come for the one before is forgotten.
  // Raises std::logic_error where the event cannot happen.
  bool take(WindowEvent event);

  // That have ended, well or not: the same number on all ranks.
  size_t ended() const { return ended_; }
  // Of this window, that asked for synchronisation.
  size_t forwards() const { return forwards_; }
  // Whether a window that has failed was open: then other ranks are owed what it has not started.
  bool owes() const { return owes_; }

  // Between two windows: the parameters of each bucket; and what coming windows expect, nothing being known.
  void set_buckets(const std::vector<std::vector<size_t>>& buckets);
  void set_expect(Expect expect);

  // ---- What is expected.

  // Whether every window has to bring every gradient.
  bool expects_all() const { return expect_ == Expect::all; }
  // Whether the end of a backward may end its window before every parameter has brought a gradient in that backward.
  bool may_end_early() const;
  // Whether nothing is known yet.
  bool is_learning() const { return learning_; }
  // Whether what is learned holds for all coming windows.
  bool learns_once() const { return expect_ == Expect::as_first; }
  // Whether the end of a backward ends its window.
  bool ends_with_backward() const { return expect_ == Expect::as_last || learning_; }
  bool waits_for(size_t parameter) const { return !learning_ && parameters_[parameter].expected > 0; }

  // ---- What has come.

  // What it means for a gradient that its hook ran in a backward that synchronises.
  enum class Hook { more_to_come, last, unexpected, too_many };
  Hook count_hook(size_t parameter);

  Arrival arrival(size_t parameter) const { return parameters_[parameter].arrival; }
  void note_local(size_t parameter);
  void note_synchronised(size_t parameter);
  // A local gradient is averaged as it is.
  void synchronise_local(size_t parameter);

  bool is_final(size_t parameter) const;
  // Those that the window waits for and whose gradients are not final.
  std::vector<size_t> not_final() const;

  // Its bucket does not wait for the parameter's gradient any more. Whether it waits for none now.
  bool completes_bucket(size_t parameter);
  bool is_complete(size_t bucket) const { return bucket < missing_.size() && missing_[bucket] == 0; }
  // No bucket waits for anything any more.
  void stop_waiting();

  // Parameters in the order in which the gradients of the first window came; empty until it has ended.
  std::vector<size_t> arrival_order() const;

  // ---- What was used.

  // The window has ended, on this rank without a failure: what came is what is expected from now on. `used`: by any rank.
  void learn(std::vector<Used> used);
  // Of a window in which this rank had no part.
  void learn_from_others(const std::vector<Used>& used);

  // In the last window; as_first, once that is fixed: in the first step.
  Used used(size_t parameter) const { return parameters_[parameter].used; }
  // As_first: in any window that was learned from; else in the last one.
  bool ever_used(size_t parameter) const { return parameters_[parameter].ever_used != Used::no; }
  std::vector<size_t> ever_used() const;
  // As_first: whether a window went well on all ranks; and that what came is expected from now on.
  bool knows_first() const { return knows_first_; }
  void fix_first();

 private:
  struct Parameter {
    Arrival arrival = Arrival::none;
    uint32_t hooks = 0;     // that have run in this window, in backwards that synchronise
    uint32_t expected = 1;  // hooks; 0: the parameter is not waited for
    uint32_t learned = 0;   // as_last: the most ever; as_first: those of the first step, whose backwards add up
    Used used = Used::no;
    Used ever_used = Used::no;
    size_t bucket = 0;  // as many as there are buckets: none
  };
  void forget_what_came();
  void count_missing();
  void expect_as_last();

  std::atomic<WindowState> state_{WindowState::idle};
  bool owes_ = false;
  size_t ended_ = 0;
  size_t forwards_ = 0;

  Expect expect_;
  bool learning_;
  bool knows_first_ = false;
  std::vector<Parameter> parameters_;
  std::vector<size_t> missing_;  // by bucket: gradients that it waits for and that are not final
  std::vector<size_t> arrival_order_;
};

}  // namespace fastddp
