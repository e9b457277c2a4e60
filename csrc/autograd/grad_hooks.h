// The first stage of a gradient's life: autograd has added it to `parameter.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace fastddp {

// Whether only the parameter refers to the memory of `gradient`.
bool held_by_parameter_alone(const at::Tensor& gradient);

// Calls `before_gradient(i)` before autograd writes to the gradient of parameter i, and `on_gradient(i, incoming, exclusive)`
// after autograd has accumulated `incoming`, which may be undefined, into it. Both calls come on autograd's thread and stream,
// without the GIL. `exclusive`: only the parameter refers to the memory of `parameter.grad`. The hooks live exactly as long as
// this object.
class GradHooks {
 public:
  using BeforeGradient = std::function<void(size_t parameter, bool is_defined)>;
  using OnGradient = std::function<void(size_t parameter, const at::Tensor& incoming, bool exclusive)>;

  GradHooks(const std::vector<at::Tensor>& parameters, const BeforeGradient& before_gradient, const OnGradient& on_gradient);
  ~GradHooks();
  C10_DISABLE_COPY_AND_ASSIGN(GradHooks);

  void remove();
  // Whether no other hooks run after autograd has accumulated a gradient.
  bool are_alone() const;

  // The parameters whose accumulator has changed since the hooks were made. After a cast or a move in place autograd makes a
  // new accumulator, which has no hook.
  std::vector<size_t> lost(const std::vector<at::Tensor>& parameters) const;

 private:
  // The type of a pointer to an autograd node differs between versions of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor&>()));
  struct Hook {
    // Keeps the hook alive: a parameter refers to its accumulator only weakly.
    Accumulator accumulator;
    const torch::autograd::FunctionPreHook* before;
    uintptr_t after;
  };
  std::vector<Hook> hooks_;
};

// Calls `on_begin` whenever a backward reaches one of `outputs`, before it goes on to what the output was computed from. The
// hooks live as long as the graph. Returns whether there are any.
bool on_backward_through(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);

}  // namespace fastddp
