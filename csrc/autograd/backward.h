// Tells whether a backward of autograd's engine is over, and what it raised.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fastddp {

// Note [A backward that raises]
// The engine runs final callbacks only when a backward ends well, and reports to nobody when one raises. So whoever comes
// next (a forward, an optimizer, a question about the state) asks whether the last backward raised, and acts on it then.
// No code of fastddp runs between the exception and its caller: no wait for other ranks, no error that hides the first one.
// The answer comes from the future that the engine completes before `backward()` returns or raises. So this object knows of
// an exception no later than the caller.
class Backward {
 public:
  // No backward.
  Backward() = default;
  // The backward that runs the calling hook.
  static Backward current();

  // It has neither ended nor raised.
  bool runs() const;
  bool raised() const;
  // What it raised.
  std::string error() const;

 private:
  // The future's callback notes the outcome here, for when the future is gone. While the future exists we ask it instead:
  // callbacks run a moment after the caller wakes. We hold it weakly: torch.distributed.autograd demands its future back.
  struct Outcome;
  c10::weak_intrusive_ptr<at::ivalue::Future> future_{c10::intrusive_ptr<at::ivalue::Future>()};
  std::shared_ptr<const Outcome> outcome_;  // null: no backward
};

// The backwards that reach one model, one at a time. "The current backward" is the one from which a function is called.
class Backwards {
 public:
  // Calls `on_begin` whenever a backward reaches one of `outputs`. If none of them has a graph, a backward is first seen
  // before its first gradient, which may be inside a reentrant checkpoint.
  void watch(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);
  // Whether the backward of the last forward is seen when it begins.
  bool are_seen_early() const { return seen_early_; }

  // The engine's number of the current backward; -1: there is none.
  static int number();
  static bool is_inside_one() { return number() != -1; }
  // Whether the current backward computes chosen gradients only: torch.autograd.grad(), backward(inputs=...).
  static bool is_for_a_choice();
  // The engine's number of the last backward.
  int last_number() const { return number_; }
  // The current backward is for a choice, and has reached outputs of the last forward.
  void note_choice() { choice_ = number(); }
  // Whether note_choice() was called in the current backward.
  bool is_noted_choice() const { return is_inside_one() && choice_ == number(); }
  // Whether a reentrant checkpoint started the current backward inside another one, which ends later.
  static bool is_inside_nested();
  // Inside a node of the current backward: whether that node alone brings something to `accumulator`.
  static bool only_this_node_brings(torch::autograd::Node* accumulator);
  // Calls back when the current backward ends well.
  static void when_this_one_ends(std::function<void()> call);
  // Makes the current backward the last one. Calls back when it ends well.
  void note(std::function<void()> on_end);
  // If the last backward still runs in another thread, waits for its end, without the lock.
  void let_last_end(std::mutex& held) const;
  void forget() { last_ = {}; }
  const Backward& last() const { return last_; }

 private:
  Backward last_;
  int number_ = -1;  // the engine's number of the last backward
  int choice_ = -1;  // and of the last one that note_choice() noted
  bool seen_early_ = false;
};

}  // namespace fastddp
