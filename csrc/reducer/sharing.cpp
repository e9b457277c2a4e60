#include "reducer/sharing.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "reducer/reducer.h"

namespace fastddp {
namespace {

struct Holders {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::vector<const Reducer*>> of;
  size_t shared = 0;  // parameters with more than one
  std::vector<const Reducer*> reducers;
};

Holders& holders() {
  static auto* const all = new Holders();  // Note [Never destroyed], cuda_driver.cpp
  return *all;
}

}  // namespace

Held::Held(const Reducer& by, const std::vector<at::Tensor>& parameters) : by_(by), parameters_(parameters) {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  for (const auto& parameter : parameters_) {
    auto& own = all.of[parameter.unsafeGetTensorImpl()];
    own.push_back(&by_);
    all.shared += own.size() == 2;
  }
  all.reducers.push_back(&by_);
}

Held::~Held() {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  all.reducers.erase(std::ranges::find(all.reducers, &by_));
  for (const auto& parameter : parameters_) {
    const auto found = all.of.find(parameter.unsafeGetTensorImpl());
    auto& own = found->second;
    own.erase(std::ranges::find(own, &by_));
    all.shared -= own.size() == 1;
    if (own.empty()) all.of.erase(found);
  }
}

bool Held::others_react() const {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  if (all.shared == 0) return false;
  return std::ranges::any_of(parameters_, [&](const auto& parameter) {
    return std::ranges::any_of(all.of[parameter.unsafeGetTensorImpl()],
                               [&](const Reducer* other) { return other != &by_ && other->reacts(); });
  });
}

bool Held::others_share_group() const {
  auto& all = holders();
  const std::lock_guard lock(all.mutex);
  return std::ranges::any_of(all.reducers, [&](const Reducer* other) {
    return other != &by_ && &other->process_group() == &by_.process_group() && other->reacts();
  });
}

}  // namespace fastddp
