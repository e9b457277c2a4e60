// The first stage of a gradient's life: autograd has added it to `parameter.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

namespace fastddp {

// Whether only the parameter refers to the memory of `gradient`.
bool held_by_parameter_alone(const at::Tensor& gradient);

// Note [Handed over]
// A compiled backward is one node of autograd's graph: autograd gets all its gradients when it ends, and nothing could travel
// before. So fastddp puts an operator behind each gradient in the compiled graph (torch_compat/compiling.py), which hands the
// gradient over as soon as it is computed. If nothing else in this backward brings a gradient to the parameter, and nobody but the
// reducer has a hook on it, the accumulator runs at once. When the engine brings the gradient again, the hook before the
// accumulator lets nothing through. So a handover is a hint: without it the same gradient comes later.
// The memory of a gradient that is handed over belongs to the graph until backward has ended. Nobody may write to it: the graph, or
// another node of autograd's, may read it later, as the gradient of something else.

// Who is told of gradients, by the numbers of parameters: on autograd's thread and stream, without the GIL.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Autograd is about to write to the gradient.
  virtual void before_gradient(size_t parameter, bool is_defined) = 0;
  // Autograd has accumulated `incoming`, which may be undefined. `exclusive`: only the parameter refers to the memory of
  // `parameter.grad`.
  virtual void on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) = 0;
  // By the caller's thread: a backward that was to bring gradients has raised.
  virtual void backward_raised() = 0;
};

// Note [Hooks that stay]
// The engine walks a node's hooks without a lock, and a backward may run in any thread, so no hook is ever taken out. An accumulator
// gets one pair of hooks, for as long as it lives, and a *line* of receivers with a lock. Models come and go in the line. Who is in
// it is held while it is called.
class Line;

// Lets a receiver know of the gradients of some parameters, from begin() to end().
class GradHooks {
 public:
  explicit GradHooks(const std::vector<at::Tensor>& parameters);
  C10_DISABLE_COPY_AND_ASSIGN(GradHooks);

  void begin(const std::weak_ptr<Receiver>& receiver);
  // Any thread may call it, also while a backward runs.
  void end();
  // Whether nobody else is told after autograd has accumulated a gradient.
  bool are_alone() const;

  // Both inside a node of the current backward: note [Handed over].
  bool may_come_early(size_t parameter) const;
  // Accumulates `gradient` and tells the receiver. `may_share`: `parameter.grad` may have the memory of `gradient`, because it leaves
  // that before anybody writes to it.
  void accumulate_early(size_t parameter, const at::Tensor& gradient, bool may_share);

  bool any_came_early_in(int backward) const;

  // The parameters whose accumulator has changed since the hooks were made. After a cast or a move in place autograd makes a
  // new accumulator, which has no hook.
  std::vector<size_t> lost(const std::vector<at::Tensor>& parameters) const;

 private:
  // The type of a pointer to an autograd node differs between versions of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor&>()));
  struct Hook {
    // Keeps the hooks alive: a parameter refers to its accumulator only weakly.
    Accumulator accumulator;
    std::shared_ptr<Line> line;
  };

  std::vector<Hook> hooks_;
  std::weak_ptr<Receiver> receiver_;
};

// The receivers of gradients that a backward from `roots` would bring, once each.
std::vector<std::shared_ptr<Receiver>> receivers_behind(const std::vector<at::Tensor>& roots);

// Calls `on_begin` whenever a backward reaches one of `outputs`, before it goes on to what the output was computed from. The
// hooks live as long as the graph. Returns whether there are any.
bool on_backward_through(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);

}  // namespace fastddp
