// The first stage in the life of a gradient: autograd has added it to `parameter.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace fastddp {

// Whether nobody but the parameter has a hand on the memory of `gradient`.
bool held_by_parameter_alone(const at::Tensor& gradient);

// Calls `before_gradient(i)` whenever autograd is about to write to a parameter's gradient, and `on_gradient(i, incoming,
// exclusive)` when it has accumulated `incoming`, which may be undefined, into that of parameter i: from the thread and under
// the stream on which it does so, without the GIL. `exclusive`: nobody but the parameter has a hand on the memory of
// `parameter.grad`. The hooks live exactly as long as this object.
class GradHooks {
 public:
  using BeforeGradient = std::function<void(size_t parameter)>;
  using OnGradient = std::function<void(size_t parameter, const at::Tensor& incoming, bool exclusive)>;

  GradHooks(const std::vector<at::Tensor>& parameters, const BeforeGradient& before_gradient,
            const OnGradient& on_gradient);
  ~GradHooks();
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  void remove();

  // Of these parameters, those whose accumulator is another one than when the hooks were made: after a cast or a move in place
  // autograd makes a new one, which has no hook.
  std::vector<size_t> lost(const std::vector<at::Tensor>& parameters) const;

 private:
  // The type of a pointer to an autograd node differs between versions of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor&>()));
  struct Hook {
    // A parameter refers to its accumulator weakly: holding it here keeps the hook on it alive.
    Accumulator accumulator;
    const torch::autograd::FunctionPreHook* before;
    uintptr_t after;
  };
  std::vector<Hook> hooks_;
};

// Calls `on_begin` whenever a backward comes by one of `outputs`, before anything that it was computed from. The hooks live
// as long as the graph. Whether there are any.
bool on_backward_through(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin);

}  // namespace fastddp
