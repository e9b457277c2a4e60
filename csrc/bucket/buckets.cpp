#include "bucket/buckets.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace fastddp {

Buckets::Buckets(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<size_t> sparse,
                 bool gradient_as_bucket_view)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      sparse_(std::move(sparse)),
      gradient_as_bucket_view_(gradient_as_bucket_view) {
  TORCH_CHECK(names_.size() == parameters_.size(), "fastddp: ", names_.size(), " names for ", parameters_.size(),
              " parameters");
}

std::vector<size_t> Buckets::replace(Plan plan, const std::function<bool(size_t)>& may_be_missing) {
  const auto nowhere = plan.size();
  std::vector<Place> places(parameters_.size(), {nowhere, 0});
  for (size_t bucket = 0; bucket < plan.size(); ++bucket) {
    for (size_t member = 0; member < plan[bucket].size(); ++member) {
      const auto parameter = plan[bucket][member];
      TORCH_CHECK(parameter < parameters_.size() && places[parameter].bucket == nowhere, "fastddp: parameter ",
                  parameter, " of bucket ", bucket, " does not exist or is in two buckets of the plan");
      places[parameter] = {bucket, member};
    }
  }
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    TORCH_CHECK(places[parameter].bucket != nowhere || may_be_missing(parameter) || is_sparse(parameter),
                "fastddp: parameter ", names_[parameter], " is in no bucket of the plan");
  }
  places_ = std::move(places);
  std::vector<size_t> movable;
  for (const auto& bucket : buckets_) {
    for (const auto member : movable_members(bucket)) movable.push_back(bucket.members[member]);
  }
  buckets_.clear();
  for (size_t bucket = 0; bucket < plan.size(); ++bucket) {
    buckets_.emplace_back(bucket, plan.size(), std::move(plan[bucket]), parameters_, names_, gradient_as_bucket_view_);
    side_streams_.add(buckets_.back().device());
  }
  set_measure_locally(measure_locally_);
  return movable;
}

void Buckets::set_measure_locally(bool measure) {
  measure_locally_ = measure;
  for (auto& bucket : buckets_) {
    bucket.local_sums.reset();
    if (measure) bucket.local_sums.emplace(bucket.device(), bucket.lengths);
  }
}

void Buckets::move_in(const std::vector<size_t>& parameters) {
  for (const auto parameter : parameters) {
    fastddp::move_in(buckets_[places_[parameter].bucket], places_[parameter].member);
  }
}

void Buckets::reset() {
  for (auto& bucket : buckets_) bucket.reset();
}

bool Buckets::is_sparse(size_t parameter) const {
  return std::ranges::find(sparse_, parameter) != sparse_.end();
}

std::string Buckets::describe(size_t parameter) const {
  std::ostringstream text;
  text << "parameter " << names_[parameter] << " (number " << parameter << ", ";
  if (has(parameter)) text << "bucket " << places_[parameter].bucket << ")";
  if (!has(parameter)) text << (is_sparse(parameter) ? "sparse)" : "in no bucket)");
  return text.str();
}

Bucket Buckets::make_another(size_t beyond, size_t count, std::vector<size_t> members) const {
  return {buckets_.size() + beyond,         buckets_.size() + count, std::move(members), parameters_, names_,
          /*gradient_as_bucket_view=*/false};
}

std::vector<Buckets::WireLayout> Buckets::wire_layouts() const {
  std::vector<WireLayout> layouts;
  for (const auto& bucket : all()) {
    auto& layout = layouts.emplace_back(WireLayout{bucket.wire_dtype, bucket.device(), {}});
    for (size_t i = 0; i < bucket.members.size(); ++i) layout.members.push_back({bucket.offsets[i], bucket.lengths[i]});
  }
  return layouts;
}

}  // namespace fastddp
