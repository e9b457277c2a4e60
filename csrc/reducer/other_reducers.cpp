#include "reducer/other_reducers.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

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

struct Holders {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::vector<const Reducer*>> of;
  std::vector<const Reducer*> reducers;
};

Holders& holders() {
  static auto* const all = new Holders();  // Note [Never destroyed], cuda_driver.cpp
  return *all;
}

}  // namespace

OtherReducers::OtherReducers(const Reducer& own, const std::vector<at::Tensor>& parameters)
    : own_(own), parameters_(parameters) {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  for (const auto& parameter : parameters_) {
    all.of[parameter.unsafeGetTensorImpl()].push_back(&own_);
  }
  all.reducers.push_back(&own_);
}

OtherReducers::~OtherReducers() {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  all.reducers.erase(std::ranges::find(all.reducers, &own_));
  for (const auto& parameter : parameters_) {
    const auto found = all.of.find(parameter.unsafeGetTensorImpl());
    auto& holding = found->second;
    holding.erase(std::ranges::find(holding, &own_));
    if (holding.empty()) all.of.erase(found);
  }
}

bool OtherReducers::read_gradients() const {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  return std::ranges::any_of(parameters_, [&](const auto& parameter) {
    const auto& reducers = all.of[parameter.unsafeGetTensorImpl()];
    const bool is_read_by_strangers = reducers_with_hooks(parameter) > reducers.size();
    return is_read_by_strangers ||
           std::ranges::any_of(reducers, [&](const Reducer* other) { return other != &own_ && other->reacts(); });
  });
}

bool OtherReducers::share_group() const {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  return std::ranges::any_of(all.reducers, [&](const Reducer* other) {
    return other != &own_ && &other->process_group() == &own_.process_group() && other->reacts();
  });
}

}  // namespace fastddp
