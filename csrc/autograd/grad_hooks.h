// The first stage of a gradient's life: autograd has added it to `parameter.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <functional>
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

// Calls `before_gradient(i)` before autograd writes to the gradient of parameter i, and `on_gradient(i, incoming, exclusive)`
// after autograd has accumulated `incoming`, which may be undefined, into it. Both calls come on autograd's thread and stream,
// without the GIL. `exclusive`: only the parameter refers to the memory of `parameter.grad`. The hooks live exactly as long as
// this object.
class GradHooks {
 public:
  using BeforeGradient = std::function<void(size_t parameter, bool is_defined)>;
  using OnGradient = std::function<void(size_t parameter, const at::Tensor& incoming, bool exclusive)>;

  GradHooks(const std::vector<at::Tensor>& parameters, const BeforeGradient& before_gradient, OnGradient on_gradient);
  ~GradHooks();
  C10_DISABLE_COPY_AND_ASSIGN(GradHooks);

  void remove();
  // Whether no other hooks run after autograd has accumulated a gradient.
  bool are_alone() const;

  // Both inside a node of the current backward: note [Handed over].
  bool may_come_early(size_t parameter) const;
  // Accumulates `gradient` and calls on_gradient. `may_share`: `parameter.grad` may have the memory of `gradient`, because it leaves
  // that before anybody writes to it.
  void accumulate_early(size_t parameter, const at::Tensor& gradient, bool may_share);

  bool any_came_early_in(int backward) const {
    return std::ranges::any_of(hooks_, [&](const Hook& hook) { return hook.came_early_in == backward; });
  }

  // The parameters whose accumulator has changed since the hooks were made. After a cast or a move in place autograd makes a
  // new accumulator, which has no hook.
  std::vector<size_t> lost(const std::vector<at::Tensor>& parameters) const;

 private:
  // The type of a pointer to an autograd node differs between versions of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor&>()));
  struct Hook {
    at::Tensor parameter;
    // Keeps the hook alive: a parameter refers to its accumulator only weakly.
    Accumulator accumulator;
    const torch::autograd::FunctionPreHook* before;
    uintptr_t after;
    int came_early_in = -1;  // the number of a backward
  };
  bool came_early(size_t parameter) const;

  const OnGradient on_gradient_;
  std::vector<Hook> hooks_;
};

// Calls `on_begin` whenever a backward reaches one of `outputs`, before it goes on to what the output was computed from. The
// hooks live as long as the graph. Returns whether there are any.
bool on_backward_through(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);

}  // namespace fastddp
