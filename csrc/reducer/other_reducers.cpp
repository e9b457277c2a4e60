#include "reducer/other_reducers.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>

#include "reducer/reducer.h"

namespace fastddp {
namespace {

// Hooks in C++: those of reducers, torch's among them. Optimizers inside backward have theirs in Python.
size_t reducers_with_hooks(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return 0;
  return std::ranges::count_if(accumulator->post_hooks(), [](const auto& hook) {
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

std::pair<std::shared_ptr<Reducer>, size_t> OtherReducers::only_reducer_of(const at::Tensor& parameter) {
  const std::lock_guard lock(registered().mutex);
  std::pair<std::shared_ptr<Reducer>, size_t> only;
  for (const auto* one : registered().all) {
    const auto found = one->numbers_.find(parameter.unsafeGetTensorImpl());
    if (found == one->numbers_.end()) continue;
    if (only.first) return {};
    only = {one->own_.weak_from_this().lock(), found->second};
  }
  return only;
}

bool OtherReducers::read_gradients() const {
  const std::lock_guard lock(registered().mutex);
  return std::ranges::any_of(parameters_, [&](const auto& parameter) {
    size_t holders = 0;
    bool is_read = false;
    for (const auto* one : registered().all) {
      if (!one->numbers_.contains(parameter.unsafeGetTensorImpl())) continue;
      ++holders;
      is_read |= one != this && one->own_.reacts();
    }
    return is_read || reducers_with_hooks(parameter) > holders;  // more: some are not fastddp's
  });
}

bool OtherReducers::share_group() const {
  const std::lock_guard lock(registered().mutex);
  return std::ranges::any_of(registered().all, [&](const auto* other) {
    return other != this && &other->own_.process_group() == &own_.process_group() && other->own_.reacts();
  });
}

}  // namespace fastddp
