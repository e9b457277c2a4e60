#include "autograd/grad_hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "autograd/backward.h"
#include "bucket/gradient_memory.h"
#include "errors/see.h"

namespace fastddp {

using torch::autograd::variable_list;
using torch::autograd::utils::LambdaPostHook;

namespace {

constexpr auto kNotCompiled =
    "fastddp: compiled autograd does not run gradient hooks of a C++ reducer; disable compiled autograd for this model.";

// Note [Who has a hand on a gradient]
// We know which tensors refer to a gradient's memory. `parameter.grad` does. Until the node's hooks have run, so does what the
// engine gave to the node, often the source of `parameter.grad`. If one of these is a view (as is the gradient of a weight that
// is used transposed), so does its base. If the memory has more references than these tensors, or a base more than these views,
// somebody else will read or write the gradient.
class References {
 public:
  explicit References(const at::Tensor& gradient) : gradient_(gradient) { add(gradient); }

  void add(const at::Tensor& tensor) {
    tensors_.push_back(tensor.unsafeGetTensorImpl());
    const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
    if (view == nullptr) return;
    if (view->has_bw_view()) add_base(view->get_backward_view().base_);
    if (view->has_fw_view() && !view->shared_view_info()) add_base(view->get_forward_view().base_);
  }

  bool are_all() const {
    auto known = tensors_.size();
    for (const auto& [base, from_views] : bases_) {
      const bool counted = std::find(tensors_.begin(), tensors_.end(), base.unsafeGetTensorImpl()) != tensors_.end();
      known += counted ? 0 : 1;
      // `bases_` holds one reference. A base that is itself in `tensors_` has its holder's as well.
      if (base.use_count() != from_views + 1 + (counted ? 1 : 0)) return false;
    }
    return gradient_.use_count() == 1 && gradient_.storage().use_count() == known;
  }

 private:
  void add_base(const at::Tensor& base) {
    for (auto& [known, from_views] : bases_) {
      if (known.is_same(base)) return void(++from_views);
    }
    bases_.push_back({base, 1});
  }

  const at::Tensor& gradient_;
  std::vector<c10::TensorImpl*> tensors_;
  std::vector<std::pair<at::Tensor, size_t>> bases_;  // with the number of views that refer to it
};

// `inputs`: what the engine gave to the accumulating node.
bool held_by_parameter_alone(const at::Tensor& gradient, const variable_list& inputs) {
  if (!gradient.defined() || gradient.layout() != c10::kStrided || gradient.requires_grad()) return false;
  References references(gradient);
  for (const auto& input : inputs) {
    if (input.defined() && input.layout() == c10::kStrided && input.is_alias_of(gradient)) references.add(input);
  }
  return references.are_all();
}

// Runs before a node of the graph. Returns whether the node gets the gradients.
class BeforeNode : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeNode(std::function<bool(const variable_list&)> call) : call_(std::move(call)) {}

  variable_list operator()(const variable_list& gradients) override {
    return call_(gradients) ? gradients : variable_list(gradients.size());
  }

  void compiled_args(torch::autograd::CompiledNodeArgs&) const override { TORCH_CHECK(false, kNotCompiled, see("FD038")); }

 private:
  std::function<bool(const variable_list&)> call_;
};

}  // namespace

bool held_by_parameter_alone(const at::Tensor& gradient) {
  return held_by_parameter_alone(gradient, {});
}

bool on_backward_through(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_begin) {
  bool any = false;
  for (const auto& output : outputs) {
    const auto& node = output.grad_fn();
    if (!node) continue;
    node->add_pre_hook(std::make_unique<BeforeNode>([on_begin](const variable_list&) {
      on_begin();
      return true;
    }));
    any = true;
  }
  return any;
}

GradHooks::GradHooks(const std::vector<at::Tensor>& parameters, const BeforeGradient& before_gradient, OnGradient on_gradient)
    : on_gradient_(std::move(on_gradient)) {
  hooks_.reserve(parameters.size());
  for (size_t index = 0; index < parameters.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[index]);
    TORCH_CHECK(accumulator, "fastddp: parameter ", index, " does not require a gradient");
    auto before = std::make_unique<BeforeNode>([this, before_gradient, index](const variable_list& incoming) {
      if (came_early(index)) return false;
      before_gradient(index, incoming.at(0).defined());
      return true;
    });
    const auto* const before_hook = before.get();
    accumulator->add_pre_hook(std::move(before));
    const auto after = accumulator->add_post_hook(std::make_unique<LambdaPostHook>(
        [this, index](const variable_list& outputs, const variable_list& inputs) {
          if (!came_early(index)) {
            on_gradient_(index, inputs.at(0), held_by_parameter_alone(hooks_[index].parameter.grad(), inputs));
          }
          return outputs;
        },
        [](torch::autograd::CompiledNodeArgs&) { TORCH_CHECK(false, kNotCompiled, see("FD038")); }));
    hooks_.push_back({parameters[index], std::move(accumulator), before_hook, after});
  }
}

GradHooks::~GradHooks() {
  remove();
}

bool GradHooks::came_early(size_t parameter) const {
  return Backwards::is_inside_one() && hooks_[parameter].came_early_in == Backwards::number();
}

bool GradHooks::may_come_early(size_t parameter) const {
  if (!Backwards::is_inside_one() || Backwards::is_for_a_choice() || parameter >= hooks_.size()) return false;
  auto& node = *hooks_[parameter].accumulator;
  const bool is_alone = node.pre_hooks().size() == 1 && node.post_hooks().size() == 1 && node.tensor_pre_hooks().empty() &&
                        !node.tensor_post_acc_grad_hooks();
  return is_alone && !came_early(parameter) && Backwards::only_this_node_brings(&node);
}

void GradHooks::accumulate_early(size_t parameter, const at::Tensor& gradient, bool may_share) {
  auto& hook = hooks_[parameter];
  const c10::AutoGradMode no_grad(false);
  // The accumulator takes the memory of a tensor to which nobody refers but its caller.
  variable_list arriving(1);
  arriving.front() = may_share ? as_gradient(gradient) : gradient.clone();
  const auto incoming = arriving.front();
  const bool shares = may_share && !hook.parameter.grad().defined();
  hook.came_early_in = Backwards::number();
  (*hook.accumulator)(std::move(arriving));
  // The graph, too, refers to what is shared, and drops it.
  on_gradient_(parameter, incoming, shares || held_by_parameter_alone(hook.parameter.grad(), {incoming}));
}

std::vector<size_t> GradHooks::lost(const std::vector<at::Tensor>& parameters) const {
  std::vector<size_t> lost;
  for (size_t index = 0; index < hooks_.size(); ++index) {
    const auto now = torch::autograd::impl::try_get_grad_accumulator(parameters[index]);
    if (now != hooks_[index].accumulator) lost.push_back(index);
  }
  return lost;
}

bool GradHooks::are_alone() const {
  return std::ranges::all_of(hooks_, [](const Hook& hook) { return hook.accumulator->post_hooks().size() <= 1; });
}

void GradHooks::remove() {
  for (auto& hook : hooks_) {
    std::erase_if(hook.accumulator->pre_hooks(), [&](const auto& other) { return other.get() == hook.before; });
    hook.accumulator->del_post_hook(hook.after);
  }
  hooks_.clear();
}

}  // namespace fastddp
