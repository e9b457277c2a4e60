#include "grad_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace fastddp {

using torch::autograd::variable_list;
using torch::autograd::utils::LambdaPostHook;

namespace {

// The engine keeps what it gave to a node until the node's hooks have run.
size_t references(const variable_list& inputs, const at::Tensor& gradient) {
  return std::count_if(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
    return input.defined() && gradient.defined() && input.layout() == c10::kStrided &&
           gradient.layout() == c10::kStrided && input.is_alias_of(gradient);
  });
}

}  // namespace

GradHooks::GradHooks(const std::vector<at::Tensor>& parameters, OnGradient on_gradient) {
  hooks_.reserve(parameters.size());
  for (size_t index = 0; index < parameters.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[index]);
    TORCH_CHECK(accumulator, "fastddp: parameter ", index, " does not require a gradient");
    const auto key = accumulator->add_post_hook(std::make_unique<LambdaPostHook>(
        [on_gradient, index, parameter = parameters[index]](const variable_list& outputs, const variable_list& inputs) {
          on_gradient(index, references(inputs, parameter.grad()));
          return outputs;
        },
        [](torch::autograd::CompiledNodeArgs&) {
          TORCH_CHECK(false,
                      "fastddp: compiled autograd does not run gradient hooks of a C++ reducer; disable compiled "
                      "autograd for this model.");
        }));
    hooks_.push_back({std::move(accumulator), key});
  }
}

GradHooks::~GradHooks() {
  remove();
}

void GradHooks::remove() {
  for (auto& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
}

}  // namespace fastddp
