// How a window ends of which nobody said what it brings: notes [Expected gradients], usage.h, and [Late gradients],
// reducer.h.
#include <ATen/ops/empty.h>

#include <map>

#include "reducer.h"

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
  while (ticks_ < ticks_of_a_window()) tick();
  const auto usage = exchanges_usage() ? start_usage_exchange(used_here()) : Sent();
  report_long_wait();
  while (finished_buckets_ < buckets_.size()) finish_next();
  side_streams_.current_streams_wait();
  for (auto& bucket : buckets_) bucket.held.release_after_join();
  for (const auto& bucket : buckets_) keep_for_current_stream(bucket.wire);
  // What follows runs on the caller's streams, which wait for all gradients here.
  sampler_.rest_begins();
  if (usage_.settles_at_end()) usage_.learn(usage.work ? receive_usage(usage) : used_here());
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

// -------------------------------------------------------------------------------------------- what all ranks have used

bool Reducer::exchanges_usage() const {
  return usage_.settles_at_end() && exchange_->is_shared();
}

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

Reducer::Sent Reducer::start_usage_exchange(const std::vector<Used>& used) {
  const auto mine = at::empty({static_cast<int64_t>(used.size())}, at::kByte);
  std::ranges::transform(used, mine.mutable_data_ptr<uint8_t>(), [](Used of) { return static_cast<uint8_t>(of); });
  std::vector<at::Tensor> wire{mine.to(parameters_.front().device())};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  usage_is_sent_ = true;
  return {wire.front(), process_group_->allreduce(wire, options)};
}

// The host waits: what it starts next depends on it.
std::vector<Used> Reducer::receive_usage(const Sent& sent) const {
  sent.work->wait();
  const auto everywhere = sent.wire.cpu();
  std::vector<Used> used(parameters_.size());
  const auto* const values = everywhere.const_data_ptr<uint8_t>();
  std::transform(values, values + used.size(), used.begin(), [](uint8_t value) { return Used(value); });
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
  exchange_->exchange_late(late);
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

void Reducer::exchange_sparse_gradients() {
  std::vector<at::Tensor> gradients;
  for (const auto parameter : sparse_) {
    gradients.push_back(sparse_gradient(parameter));
    TORCH_CHECK(
        !gradients.back().defined() || gradients.back().is_sparse(), "fastddp: ", describe(parameter),
        " got a dense gradient, but its module has sparse=True: is it used outside of that module, too? Build the "
        "module with sparse=False.");
  }
  sparse_is_sent_ = true;
  sum_over_ranks(gradients, SparseStandIn::nothing);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    if (gradients[i].defined()) parameters_[sparse_[i]].mutable_grad() = gradients[i];
  }
}

void Reducer::abandon_sparse_gradients(SparseStandIn stand_in) {
  if (sparse_is_sent_) return;
  std::vector<at::Tensor> gradients(sparse_.size());
  sum_over_ranks(gradients, stand_in);
}

void Reducer::sum_over_ranks(std::vector<at::Tensor>& sparse_gradients, SparseStandIn stand_in) {
  if (!exchange_->is_shared()) return;
  std::vector<at::Tensor> parameters;
  for (const auto parameter : sparse_) parameters.push_back(parameters_[parameter]);
  const auto scale = factor_ / static_cast<double>(process_group_->getSize());
  sum_sparse_gradients(*process_group_, sparse_gradients, parameters, scale, stand_in);
}

// ----------------------------------------------------------------------------------------------------------- listeners

void Reducer::report_averaged_at_end() {
  if (!on_averaged_) return;
  // What no rank used keeps what it had: a gradient that only this rank knows, maybe.
  std::vector<size_t> averaged;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const bool is_reported_by_bucket = usage_.is_known_beforehand() && !is_sparse(parameter);
    if (!is_reported_by_bucket && usage_.used(parameter) != Used::no) averaged.push_back(parameter);
  }
  if (!averaged.empty()) on_averaged_(averaged);
}

// Where the host waits, and has waited for long, other ranks may wonder what this one has.
void Reducer::report_long_wait() {
  constexpr auto patience = std::chrono::seconds(2);
  if (!on_waiting_ || finished_buckets_ == buckets_.size()) return;
  if (!exchange_->arrives_within(buckets_[finished_buckets_], patience)) on_waiting_(windows_);
}

}  // namespace fastddp
