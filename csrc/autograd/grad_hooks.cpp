#include "autograd/grad_hooks.h"

#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "autograd/backward.h"
#include "bucket/gradient_memory.h"
#include "errors/see.h"

namespace fastddp {

using torch::autograd::variable_list;

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

// ------------------------------------------------------------------------------------------------ note [Hooks that stay]

class Line {
 public:
  explicit Line(at::Tensor parameter) : parameter_(std::move(parameter)) {}

  struct Place {
    std::weak_ptr<Receiver> receiver;
    size_t number;  // of the parameter, there
  };
  void add(const Place& place) {
    const std::lock_guard lock(mutex_);
    std::erase_if(places_, [](const Place& other) { return other.receiver.expired(); });
    places_.push_back(place);
  }
  void remove(const std::weak_ptr<Receiver>& receiver) {
    const std::lock_guard lock(mutex_);
    std::erase_if(places_, [&](const Place& other) {
      return !other.receiver.owner_before(receiver) && !receiver.owner_before(other.receiver);
    });
  }
  // Whoever is there now.
  c10::SmallVector<std::pair<std::shared_ptr<Receiver>, size_t>, 2> now() const {
    c10::SmallVector<std::pair<std::shared_ptr<Receiver>, size_t>, 2> found;
    const std::lock_guard lock(mutex_);
    for (const auto& [receiver, number] : places_) {
      if (auto alive = receiver.lock()) found.emplace_back(std::move(alive), number);
    }
    return found;
  }
  bool is_for_one() const { return now().size() <= 1; }

  const at::Tensor& gradient() const { return parameter_.grad(); }
  bool came_early() const { return Backwards::is_inside_one() && came_early_in == Backwards::number(); }
  int came_early_in = -1;  // the number of a backward, in whose thread this is read and written

 private:
  const at::Tensor parameter_;
  mutable std::mutex mutex_;
  std::vector<Place> places_;
};

namespace {

// Runs after an accumulator has accumulated a gradient.
class AfterGradient : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterGradient(std::shared_ptr<Line> line) : line(std::move(line)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (line->came_early()) return outputs;
    for (const auto& [receiver, number] : line->now()) {
      receiver->on_gradient(number, inputs.at(0), held_by_parameter_alone(line->gradient(), inputs));
    }
    return outputs;
  }
  void compiled_args(torch::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(line->now().empty(), kNotCompiled, see("FD038"));
  }

  const std::shared_ptr<Line> line;
};

// The line of an accumulator; null: it has none.
std::shared_ptr<Line> line_of(torch::autograd::Node& accumulator) {
  for (const auto& hook : accumulator.post_hooks()) {
    if (const auto* own = dynamic_cast<const AfterGradient*>(hook.get())) return own->line;
  }
  return nullptr;
}

}  // namespace

GradHooks::GradHooks(const std::vector<at::Tensor>& parameters) {
  static auto& making = *new std::mutex;
  const std::lock_guard lock(making);
  for (size_t index = 0; index < parameters.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[index]);
    TORCH_CHECK(accumulator, "fastddp: parameter ", index, " does not require a gradient");
    auto line = line_of(*accumulator);
    if (line == nullptr) {
      line = std::make_shared<Line>(parameters[index]);
      accumulator->add_pre_hook(std::make_unique<BeforeNode>([line](const variable_list& incoming) {
        if (line->came_early()) return false;
        for (const auto& [receiver, number] : line->now()) receiver->before_gradient(number, incoming.at(0).defined());
        return true;
      }));
      accumulator->add_post_hook(std::make_unique<AfterGradient>(line));
    }
    hooks_.push_back({std::move(accumulator), std::move(line)});
  }
}

void GradHooks::begin(const std::weak_ptr<Receiver>& receiver) {
  receiver_ = receiver;
  for (size_t index = 0; index < hooks_.size(); ++index) hooks_[index].line->add({receiver, index});
}

void GradHooks::end() {
  for (const auto& hook : hooks_) hook.line->remove(receiver_);
}

bool GradHooks::are_alone() const {
  return std::ranges::all_of(
      hooks_, [](const Hook& hook) { return hook.accumulator->post_hooks().size() <= 1 && hook.line->is_for_one(); });
}

bool GradHooks::any_came_early_in(int backward) const {
  return std::ranges::any_of(hooks_, [&](const Hook& hook) { return hook.line->came_early_in == backward; });
}

bool GradHooks::may_come_early(size_t parameter) const {
  if (!Backwards::is_inside_one() || Backwards::is_for_a_choice() || parameter >= hooks_.size()) return false;
  auto& node = *hooks_[parameter].accumulator;
  const auto& line = *hooks_[parameter].line;
  const bool is_alone = node.pre_hooks().size() == 1 && node.post_hooks().size() == 1 && node.tensor_pre_hooks().empty() &&
                        !node.tensor_post_acc_grad_hooks() && line.is_for_one();
  return is_alone && !line.came_early() && Backwards::only_this_node_brings(&node);
}

void GradHooks::accumulate_early(size_t parameter, const at::Tensor& gradient, bool may_share) {
  const auto& [accumulator, line] = hooks_[parameter];
  const c10::AutoGradMode no_grad(false);
  // The accumulator takes the memory of a tensor to which nobody refers but its caller.
  variable_list arriving(1);
  arriving.front() = may_share ? as_gradient(gradient) : gradient.clone();
  const auto incoming = arriving.front();
  const bool shares = may_share && !line->gradient().defined();
  line->came_early_in = Backwards::number();
  (*accumulator)(std::move(arriving));
  // The graph, too, refers to what is shared, and drops it.
  const bool exclusive = shares || held_by_parameter_alone(line->gradient(), {incoming});
  if (const auto receiver = receiver_.lock()) receiver->on_gradient(parameter, incoming, exclusive);
}

std::vector<size_t> GradHooks::lost(const std::vector<at::Tensor>& parameters) const {
  std::vector<size_t> lost;
  for (size_t index = 0; index < hooks_.size(); ++index) {
    const auto now = torch::autograd::impl::try_get_grad_accumulator(parameters[index]);
    if (now != hooks_[index].accumulator) lost.push_back(index);
  }
  return lost;
}

std::vector<std::shared_ptr<Receiver>> receivers_behind(const std::vector<at::Tensor>& roots) {
  std::vector<std::shared_ptr<Receiver>> found;
  std::vector<torch::autograd::Node*> left;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto reach = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) left.push_back(node);
  };
  for (const auto& root : roots) reach(torch::autograd::impl::gradient_edge(root).function.get());
  while (!left.empty()) {
    auto* const node = left.back();
    left.pop_back();
    for (const auto& edge : node->next_edges()) reach(edge.function.get());
    const auto line = line_of(*node);
    if (line == nullptr) continue;
    for (auto& [receiver, number] : line->now()) {
      if (std::ranges::find(found, receiver) == found.end()) found.push_back(receiver);
    }
  }
  return found;
}

}  // namespace fastddp
