#include "reducer/closing.h"

#include <limits>
#include <map>
#include <utility>

#include "bucket/packing.h"
#include "errors/see.h"
#include "reducer/errors.h"
#include "reducer/reduction.h"
#include "transport/sparse.h"

namespace fastddp {

Closing::Closing(Buckets& buckets, Window& window, c10d::ProcessGroup& group, const SharedSums& shared_sums)
    : buckets_(buckets), window_(window), group_(group), shared_sums_(shared_sums), failure_(group.getRank()) {}

void Closing::reset() {
  done_ = Done::nothing;
  late_started_ = 0;
  status_.reset();
  heard_.reset();
}

// ------------------------------------------------------------------------------------------------------------- status

static_assert(kStatusRoom == WindowStatus::kNumbers);

WindowStatus::Said Closing::said() const {
  auto said = said_;
  said.rank = group_.getRank();
  said.model = model_;
  if (window_.ends_with_backward()) {
    said.used = said.failed ? std::vector<Used>(buckets_.parameters().size(), Used::no) : used_here();
  }
  if (local_ != nullptr) {
    said.not_finite = local_->may_spoil_a_sum(group_.getSize());
    // Kernels on the streams of gradients write the rows that are counted here.
    // Orders no gradients.
    for (const auto& bucket : buckets_.all()) bucket.window.producers.current_stream_waits(bucket.device());
    said.not_finite_count = local_->not_finite_count();
  }
  return said;
}

void Closing::send_status(const Driver& driver) {
  if (!exchanges_status(driver) || status_.is_sent()) return;
  // Orders no gradients.
  if (local_ != nullptr) buckets_.side_streams().wait_for_current_streams();
  // Orders no gradients.
  const auto on_side_streams = buckets_.side_streams().make_current();
  status_.send(*status_group(driver), buckets_.device(), said());
}

void Closing::host_waits_for_status(Driver& driver) {
  // Orders no gradients.
  const auto on_side_streams = buckets_.side_streams().make_current();
  take_status_that_rode(driver);
  heard_ = status_.wait();
}

bool Closing::receive_status(Driver& driver) {
  const bool has_used = window_.ends_with_backward();
  const bool host_needs_it = has_used || !buckets_.sparse().empty() || !has_streams(buckets_.device());
  if (!exchanges_status(driver)) {
    if (has_used) window_.learn(used_here());
  } else if (!host_needs_it) {
    // Orders no gradients.
    const auto on_side_streams = buckets_.side_streams().make_current();
    take_status_that_rode(driver);
    status_.arrive_later(window_.ended());
  } else {
    host_waits_for_status(driver);
    done_ = Done::status;  // even if a rank failed: to wait again may take one more collective
    if (heard_->failed) return failure_.happened_elsewhere(*heard_->failed, window_.ended()), false;
    if (has_used) window_.learn(heard_->used);
  }
  done_ = Done::status;
  return true;
}

std::vector<Used> Closing::used_here() const {
  std::vector<Used> used(buckets_.parameters().size(), Used::no);
  for (const auto& bucket : buckets_.all()) {
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto parameter = bucket.layout.parameter(member);
      if (!came(window_, buckets_, parameter)) continue;
      const bool is_late = left_out(bucket, member).defined() && window_.arrival(parameter) == Arrival::synchronised;
      used[parameter] = is_late ? Used::late : Used::yes;
    }
  }
  for (const auto parameter : buckets_.sparse()) used[parameter] = came(window_, buckets_, parameter) ? Used::yes : Used::no;
  return used;
}

// ---------------------------------------------------------------------------------------------------- sparse gradients

void Closing::check_sparse_gradients() const {
  for (const auto parameter : buckets_.sparse()) {
    const auto& gradient = buckets_.gradient(parameter);
    TORCH_CHECK(!gradient.defined() || gradient.is_sparse(), "fastddp: ", buckets_.describe(parameter), kSparseIsDense,
                see("FD009"));
  }
}

// What this rank contributes. As for dense gradients: if any rank used the parameter, `.grad` counts, even if this window did
// not bring it. If there is none, a gradient without rows is sent, so that either all ranks have a gradient or none has.
at::Tensor Closing::sparse_gradient(size_t parameter) const {
  if (!came(window_, buckets_, parameter) && window_.used(parameter) == Used::no) return {};
  const auto& gradient = buckets_.gradient(parameter);
  const bool counts = gradient.defined() && !shared_sums_.counts_elsewhere(parameter);
  return counts ? gradient : gradient_without_rows(buckets_.parameters()[parameter]);
}

void Closing::exchange_sparse_gradients(const Driver& driver) {
  std::vector<at::Tensor> gradients;
  for (const auto parameter : buckets_.sparse()) gradients.push_back(sparse_gradient(parameter));
  done_ = Done::sparse_gradients;  // even if the next line raises
  sum_over_ranks(driver, gradients, /*is_void=*/false);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) buckets_.parameters()[buckets_.sparse()[i]].mutable_grad() = gradients[i];
  }
}

void Closing::sum_over_ranks(const Driver& driver, std::vector<at::Tensor>& sparse_gradients, bool is_void) {
  auto* const group = driver.way()->all.get();
  if (group == nullptr) return;
  std::vector<at::Tensor> parameters;
  for (const auto parameter : buckets_.sparse()) parameters.push_back(buckets_.parameters()[parameter]);
  sum_sparse_gradients(*group, sparse_gradients, parameters, driver.scale(), is_void);
}

// ------------------------------------------------------------------------------------------------------ late gradients

// Buckets of the gradients that are late on any rank; the same on all ranks.
std::vector<Bucket> Closing::late_buckets() const {
  std::map<std::pair<std::string, c10::ScalarType>, std::vector<size_t>> late;
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (!window_.ends_with_backward() || window_.used(parameter) != Used::late) continue;
    const auto& tensor = buckets_.parameters()[parameter];
    late[{tensor.device().str(), buckets_.gradient_dtype(parameter)}].push_back(parameter);
  }
  std::vector<Bucket> made;
  for (const auto& [kind, members] : late) made.push_back(buckets_.make_another(made.size(), late.size(), members));
  for (auto& bucket : made) bucket.make_wire();
  return made;
}

void Closing::exchange_late_gradients(Driver& driver) {
  if (window_.expects_all()) return;
  auto late = late_buckets();
  for (auto& bucket : late) {
    std::vector<Slot> slots;
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& [index, place] = buckets_.place(bucket.layout.parameter(member));
      slots.push_back({left_out(buckets_[index], place), bucket.wire.parts[member]});
    }
    pack_with_operators(slots, 1.0);
    average_late(bucket, driver);
  }
  resolve_placeholders(driver);
  for (auto& bucket : late) {
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& [index, place] = buckets_.place(bucket.layout.parameter(member));
      add_late(buckets_[index], place, bucket, member);
    }
  }
}

void Closing::resolve_placeholders(Driver& driver) {
  for (auto& bucket : buckets_.all()) {
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (!bucket.window[member].has_placeholder()) continue;
      const bool is_used = window_.used(bucket.layout.parameter(member)) != Used::no;
      if (!is_used) driver.discard(bucket, member);
      resolve_placeholder(bucket, member, is_used);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ without gradients

bool Closing::abandon(Driver& driver) {
  if (!exchanges_status(driver)) return false;
  send_status(driver);
  if (done_ == Done::nothing) host_waits_for_status(driver);
  if (heard_ && heard_->failed) return false;
  // All ranks have said that their window is well (this one before it failed), so the others go on.
  if (window_.ends_with_backward() && done_ == Done::nothing) window_.learn_from_others(heard_->used);
  if (done_ != Done::sparse_gradients) {
    std::vector<at::Tensor> nothing(buckets_.sparse().size());
    sum_over_ranks(driver, nothing, said_.failed);
  }
  auto late = late_buckets();
  while (late_started_ < late.size()) {
    auto& next = late[late_started_];
    next.wire.tensor().fill_(said_.failed ? std::numeric_limits<double>::quiet_NaN() : 0.0);
    average_late(next, driver);
  }
  if (!said_.failed) discard_unused(driver);
  return true;
}

// Even without a part in the window this rank has added up gradients of all parameters. Those that no rank used are dropped.
void Closing::discard_unused(Driver& driver) const {
  if (!window_.ends_with_backward()) return;
  for (auto& bucket : buckets_.all()) {
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (window_.used(bucket.layout.parameter(member)) != Used::no) continue;
      driver.discard(bucket, member);
      if (bucket.shard != nullptr) bucket.held(member).reset();
    }
  }
}

}  // namespace fastddp
