#include "reducer/other_reducers.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "reducer/reducer.h"

namespace fastddp {
namespace {

struct Holders {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::vector<const Reducer*>> of;
  size_t shared = 0;  // parameters with more than one reducer
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
    auto& holding = all.of[parameter.unsafeGetTensorImpl()];
    holding.push_back(&own_);
    all.shared += holding.size() == 2;
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
    all.shared -= holding.size() == 1;
    if (holding.empty()) all.of.erase(found);
  }
}

bool OtherReducers::read_gradients() const {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  if (all.shared == 0) return false;
  return std::ranges::any_of(parameters_, [&](const auto& parameter) {
    return std::ranges::any_of(all.of[parameter.unsafeGetTensorImpl()],
                               [&](const Reducer* other) { return other != &own_ && other->reacts(); });
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
