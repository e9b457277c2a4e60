// A backward as autograd's engine runs it: whether it is over, and what it raised.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fastddp {

// Note [A backward that raises]
// The engine runs final callbacks only when a backward ends well, and tells nobody when one raises. So nobody is told here
// either: whoever comes next (a forward, an optimizer, a question about the state) asks, and what is to be done is done then.
// Nothing of fastddp's runs between the exception and its caller: no wait for other ranks, no error that hides the first one.
// The answer comes from the future that the engine completes before `backward()` returns or raises: there is no moment in
// which the caller knows of an exception and this object does not.
class Backward {
 public:
  // None.
  Backward() = default;
  // The one that calls this, from a hook.
  static Backward current();

  // Neither ended nor raised.
  bool runs() const;
  bool raised() const;
  // Of one that raised.
  std::string error() const;

 private:
  // What the future's own callback has noted, for when the future is gone. As long as it is there it is asked itself, since
  // callbacks run a moment after the caller has been woken. It is not kept: torch.distributed.autograd demands its future back.
  struct Outcome;
  c10::weak_intrusive_ptr<at::ivalue::Future> future_{c10::intrusive_ptr<at::ivalue::Future>()};
  std::shared_ptr<const Outcome> outcome_;  // null: none
};

// The backwards that come by one model, one at a time.
class Backwards {
 public:
  // Calls back whenever one comes by `outputs`. Where there is nothing to call back from, a backward is seen before its first
  // gradient, which may be inside a reentrant checkpoint.
  void watch(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);
  // Whether the backward of the last forward is seen when it begins.
  bool are_seen_early() const { return seen_early_; }

  // Whether this is called from inside of one.
  static bool is_inside_one();
  // Whether the one that calls this is to bring some gradients only: torch.autograd.grad(), backward(inputs=...).
  static bool is_for_a_choice();
  // The one that calls this is such a one, and comes by outputs of the last forward.
  void note_choice();
  // Whether the one that calls this has done so.
  bool is_noted_choice() const;
  // Whether the one that calls this was called from inside of another, by a reentrant checkpoint: it ends before that other one.
  static bool is_inside_nested();
  // Calls back when the one that calls this ends well.
  static void when_this_one_ends(std::function<void()> call);
  // The one that calls this is the last one. Calls back when it ends well.
  void note(std::function<void()> on_end);
  // Where the last one runs in another thread: waits for its end, without the lock.
  void let_last_end(std::mutex& held) const;
  void forget() { last_ = {}; }
  const Backward& last() const { return last_; }
  // Maybe: whether one has run before the last one that came by nothing of this model.
  bool lost_one() const { return lost_one_; }

 private:
  Backward last_;
  int number_ = -1;  // the engine's, of the last one
  int choice_ = -1;  // and of the last one for a choice that came by outputs
  bool lost_one_ = false;
  bool seen_early_ = false;
};

}  // namespace fastddp
