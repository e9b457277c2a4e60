// How a window ends of which nobody said what it brings: notes [Expected gradients], usage.h, and [Late gradients],
// reducer.h.
#include <ATen/ops/empty.h>

#include <map>

#include "device/cuda_driver.h"
#include "reducer/reducer.h"

namespace fastddp {

// No gradient comes any more: what has come is sent, something stands in for what is missing.
void Reducer::settle_missing() {
  for (auto bucket = ticks_; bucket < buckets_.size(); ++bucket) {
    auto& settled = buckets_[bucket];
    for (size_t member = 0; member < settled.members.size(); ++member) {
      if (settled.gradients[member].final) continue;
      if (came(settled.members[member])) {
        arrive(settled, member, held_by_parameter_alone(settled.parameters[member].grad()));
      } else if (!settled.gradients[member].stood_in) {
        let_stand_in(settled, member);
      }
    }
    settled.missing = 0;
  }
}

void Reducer::finish_window() {
  check_sparse_gradients();
  const WaitClock::Wait wait(*wait_clock_, windows_, buckets_.size());
  while (ticks_ < ticks_of_a_window()) tick();
  const bool sends_status_first = exchange_->starts_all_in_ticks();
  if (exchanges_status() && sends_status_first) send_status(/*failed=*/false);
  while (finished_buckets_ < buckets_.size()) finish_next();
  if (exchanges_status() && !sends_status_first) send_status(/*failed=*/false);
  side_streams_.current_streams_wait();
  for (auto& bucket : buckets_) bucket.held.release_after_join();
  for (const auto& bucket : buckets_) keep_for_current_stream(bucket.wire);
  // What follows runs on the caller's streams, which wait for all gradients here.
  sampler_.rest_begins();
  receive_status();
  exchange_sparse_gradients();
  if (!usage_.is_known_beforehand()) {
    auto late = late_buckets();
    for (auto& bucket : late) send_late(bucket);
    settle_stand_ins();
    for (auto& bucket : late) receive_late(bucket);
  }
  sampler_.rest_ends();
  report_averaged_at_end();
  ready_times_.end_window();
  ++windows_;
  state_ = WindowState::finished;
  step_is_open_ = false;
  window_.end();
  sampler_.window_ends();
}

// ----------------------------------------------------------------------------- note [Status of a window], window/status.h

// Note [Whose usage counts]
// What becomes of a gradient depends on whether the ranks with which this one averages used its parameter. Other ranks' use
// says nothing about it, and what they have late travels in collectives of their own. So who used what, and whose window failed,
// is told among the ranks of the exchange. But a static graph's first step decides which parameters buckets hold, and these have
// to be the same on all ranks of the model, for the exchanges of later windows go over others than the first's. While that is
// learned, what any rank of the model uses counts as used. Where ranks share nothing, each has its own use.
c10d::ProcessGroup* Reducer::status_group() const {
  auto* const group = exchange_->group();
  const bool decides_over_buckets = usage_.is_learning() && usage_.is_for_good();
  return group != nullptr && decides_over_buckets ? process_group_.get() : group;
}

// A step that is being captured has none: its graph is replayed without the host, which could not be told.
bool Reducer::exchanges_status() const {
  const auto* const group = status_group();
  return group != nullptr && group->getSize() > 1 && !is_capturing(parameters_.front().device());
}

bool Reducer::status_has_used() const {
  return usage_.settles_at_end();
}

void Reducer::send_status(bool failed) {
  WindowStatus::Said said{process_group_->getRank(), failed, forwards_, lost_a_backward_, {}};
  if (status_has_used()) said.used = failed ? std::vector<Used>(parameters_.size(), Used::no) : used_here();
  // Orders no gradients.
  const auto on_side_streams = side_streams_.make_current();
  status_.send(*status_group(), parameters_.front().device(), said);
}

// On a device with streams the host waits for it only if it needs it to go on.
bool Reducer::waits_for_status() const {
  return status_has_used() || !sparse_.empty() || !has_streams(parameters_.front().device());
}

void Reducer::host_waits_for_status() {
  // Orders no gradients.
  const auto on_side_streams = side_streams_.make_current();
  status_.wait();
}

void Reducer::receive_status() {
  if (!exchanges_status()) {
    if (status_has_used()) usage_.learn(used_here());
  } else if (!waits_for_status()) {
    // Orders no gradients.
    const auto on_side_streams = side_streams_.make_current();
    status_.arrive_later(windows_);
  } else {
    host_waits_for_status();
    if (status_.failed()) {
      fail_elsewhere(*status_.failed(), windows_++);
      TORCH_CHECK(false, failure_);
    }
    if (status_has_used()) usage_.learn(status_.used());
  }
  status_is_received_ = true;
}

// ---------------------------------------------------------------------------------------------- what this rank has used

std::vector<Used> Reducer::used_here() const {
  std::vector<Used> used(parameters_.size(), Used::no);
  for (const auto& bucket : buckets_) {
    for (size_t member = 0; member < bucket.members.size(); ++member) {
      const auto parameter = bucket.members[member];
      if (!came(parameter)) continue;
      const bool is_late = left_out(bucket, member).defined() && arrivals_[parameter] == Arrival::ready;
      used[parameter] = is_late ? Used::late : Used::yes;
    }
  }
  for (const auto parameter : sparse_) used[parameter] = came(parameter) ? Used::yes : Used::no;
  return used;
}

void Reducer::settle_stand_ins() {
  for (auto& bucket : buckets_) {
    for (size_t member = 0; member < bucket.members.size(); ++member) {
      if (!bucket.gradients[member].stood_in) continue;
      const bool is_used = usage_.used(bucket.members[member]) != Used::no;
      if (!is_used) exchange_->forgo(bucket, member);
      settle_stand_in(bucket, member, is_used);
    }
  }
}

// ------------------------------------------------------------------------------------------------------ late gradients

// Buckets of what is late on any rank, the same on all.
std::vector<Bucket> Reducer::late_buckets() const {
  std::map<std::pair<std::string, c10::ScalarType>, std::vector<size_t>> late;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (!usage_.settles_at_end() || usage_.used(parameter) != Used::late) continue;
    const auto& tensor = parameters_[parameter];
    late[{tensor.device().str(), tensor.scalar_type()}].push_back(parameter);
  }
  std::vector<Bucket> buckets;
  for (const auto& [kind, members] : late) {
    buckets.emplace_back(buckets_.size() + buckets.size(), buckets_.size() + late.size(), members, parameters_, names_,
                         /*gradient_as_bucket_view=*/false);
  }
  return buckets;
}

void Reducer::send_late(Bucket& late) {
  make_wire(late);
  std::vector<Slot> slots;
  for (size_t member = 0; member < late.members.size(); ++member) {
    const auto& [bucket, place] = places_[late.members[member]];
    slots.push_back({left_out(buckets_[bucket], place), late.views[member]});
  }
  pack_with_operators(slots, 1.0);
  const auto wait = exchange_->start_late(late);
  ++late_sent_;  // from here on, whatever becomes of it
  wait();
}

void Reducer::receive_late(Bucket& late) {
  for (size_t member = 0; member < late.members.size(); ++member) {
    amend(buckets_[places_[late.members[member]].bucket]);
    about_to_write(late.parameters[member].grad()).add_(late.views[member]);
  }
}

// ---------------------------------------------------------------------------------------------------- sparse gradients

// What this rank contributes: as for dense gradients, where any rank used the parameter that is what is there, though this
// window did not bring it; and a gradient of no rows where nothing is there, so that all ranks have one or none has.
at::Tensor Reducer::sparse_gradient(size_t parameter) const {
  if (!came(parameter) && usage_.used(parameter) == Used::no) return {};
  const auto& gradient = parameters_[parameter].grad();
  return gradient.defined() ? gradient : gradient_without_rows(parameters_[parameter]);
}

// Before the status is sent, which tells other ranks of it.
void Reducer::check_sparse_gradients() const {
  for (const auto parameter : sparse_) {
    const auto& gradient = parameters_[parameter].grad();
    TORCH_CHECK(
        !gradient.defined() || gradient.is_sparse(), "fastddp: ", describe(parameter),
        " got a dense gradient, but its module has sparse=True: is it used outside of that module, too? Build the "
        "module with sparse=False.");
  }
}

void Reducer::exchange_sparse_gradients() {
  std::vector<at::Tensor> gradients;
  for (const auto parameter : sparse_) gradients.push_back(sparse_gradient(parameter));
  sparse_is_sent_ = true;
  sum_over_ranks(gradients, SparseStandIn::nothing);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    if (gradients[i].defined()) parameters_[sparse_[i]].mutable_grad() = gradients[i];
  }
}

void Reducer::sum_over_ranks(std::vector<at::Tensor>& sparse_gradients, SparseStandIn stand_in) {
  auto* const group = exchange_->group();
  if (group == nullptr) return;
  std::vector<at::Tensor> parameters;
  for (const auto parameter : sparse_) parameters.push_back(parameters_[parameter]);
  sum_sparse_gradients(*group, sparse_gradients, parameters, exchange_->scale(), stand_in);
}

// ----------------------------------------------------------------------------------------------------------- listeners

// To somebody who listens.
void Reducer::report_averaged(const std::vector<size_t>& parameters) {
  const auto call = on_averaged_;
  const Unlocked unlocked(mutex_);
  call(parameters);
}

void Reducer::report_averaged_at_end() {
  if (!on_averaged_) return;
  // What no rank used keeps what it had: a gradient that only this rank knows, maybe.
  std::vector<size_t> averaged;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const bool is_reported_by_bucket = usage_.is_known_beforehand() && !is_sparse(parameter);
    if (!is_reported_by_bucket && usage_.used(parameter) != Used::no) averaged.push_back(parameter);
  }
  if (!averaged.empty()) report_averaged(averaged);
}

}  // namespace fastddp
