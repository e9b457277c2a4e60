#include "reducer/other_reducers.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>

#include "reducer/reducer.h"

namespace fastddp {
namespace {

// Hooks in C++, as torch's reducer has. Optimizers inside backward have theirs in Python.
bool has_hooks_of_others(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator && std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
           return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
         });
}

struct Registered {
  std::mutex mutex;
  std::vector<const OtherReducers*> all;
};

Registered& registered() {
  static auto* const made = new Registered();  // Note [Never destroyed], cuda_driver.cpp
  return *made;
}

}  // namespace

OtherReducers::OtherReducers(Reducer& own, const std::vector<at::Tensor>& parameters) : own_(own), parameters_(parameters) {
  for (const auto& parameter : parameters) numbers_.emplace(parameter.unsafeGetTensorImpl(), numbers_.size());
  const std::lock_guard lock(registered().mutex);
  registered().all.push_back(this);
}

OtherReducers::~OtherReducers() {
  const std::lock_guard lock(registered().mutex);
  std::erase(registered().all, this);
}

std::pair<std::shared_ptr<Reducer>, size_t> OtherReducers::only_reducer_of(int64_t identity) {
  const std::lock_guard lock(registered().mutex);
  std::pair<std::shared_ptr<Reducer>, size_t> only;
  for (const auto* one : registered().all) {
    const auto found = one->numbers_.find(reinterpret_cast<const at::TensorImpl*>(identity));
    if (found == one->numbers_.end()) continue;
    if (only.first) return {};
    only = {one->own_.weak_from_this().lock(), found->second};
  }
  return only;
}

void OtherReducers::backward_raised(const std::vector<at::Tensor>& roots) {
  auto told = receivers_behind(roots);
  const bool has_graph = std::ranges::any_of(roots, &at::Tensor::requires_grad);
  if (!has_graph) {
    const std::lock_guard lock(registered().mutex);
    for (const auto* one : registered().all) {
      if (auto alive = one->own_.weak_from_this().lock(); alive && alive->reacts()) told.push_back(std::move(alive));
    }
  }
  for (const auto& receiver : told) receiver->backward_raised();
}

bool OtherReducers::read_gradients() const {
  const std::lock_guard lock(registered().mutex);
  return std::ranges::any_of(parameters_, [&](const auto& parameter) {
    const auto reads = [&](const auto* one) {
      return one != this && one->numbers_.contains(parameter.unsafeGetTensorImpl()) && one->own_.reacts();
    };
    return has_hooks_of_others(parameter) || std::ranges::any_of(registered().all, reads);
  });
}

bool OtherReducers::share_group() const {
  const std::lock_guard lock(registered().mutex);
  return std::ranges::any_of(registered().all, [&](const auto* other) {
    return other != this && &other->own_.process_group() == &own_.process_group() && other->own_.reacts();
  });
}

}  // namespace fastddp
