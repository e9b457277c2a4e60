#include "bucket/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <sstream>
#include <utility>

#include "bucket/measuring.h"
#include "bucket/packing.h"
#include "bucket/shard.h"

namespace fastddp {
namespace {

std::vector<at::Tensor> holders_of(const std::vector<at::Tensor>& parameters, const GradientForm& form) {
  if (!form.in_main_grad) return parameters;
  std::vector<at::Tensor> holders;
  for (size_t parameter = 0; parameter < parameters.size(); ++parameter) holders.push_back(at::empty({0}));
  return holders;
}

}  // namespace

Buckets::Buckets(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<size_t> sparse,
                 GradientForm form)
    : parameters_(std::move(parameters)),
      holders_(holders_of(parameters_, form)),
      names_(std::move(names)),
      sparse_(std::move(sparse)),
      form_(form) {
  TORCH_CHECK(names_.size() == parameters_.size(), "fastddp: ", names_.size(), " names for ", parameters_.size(),
              " parameters");
}

Buckets::Others Buckets::others(const Plan& plan, const std::function<bool(size_t)>& may_be_missing) {
  const auto nowhere = plan.size();
  Others others{.places = {parameters_.size(), Place{nowhere, 0}}};
  for (size_t bucket = 0; bucket < plan.size(); ++bucket) {
    for (size_t member = 0; member < plan[bucket].size(); ++member) {
      const auto parameter = plan[bucket][member];
      TORCH_CHECK(parameter < parameters_.size() && others.places[parameter].bucket == nowhere, "fastddp: parameter ",
                  parameter, " of bucket ", bucket, " does not exist or is in two buckets of the plan");
      others.places[parameter] = {bucket, member};
    }
    others.all.push_back(make(bucket, plan.size(), plan[bucket], form_));
    side_streams_.add(others.all.back().device());
  }
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    TORCH_CHECK(others.places[parameter].bucket != nowhere || may_be_missing(parameter) || is_sparse(parameter),
                "fastddp: parameter ", names_[parameter], " is in no bucket of the plan");
  }
  for (const auto& bucket : buckets_) {
    if (form_.in_main_grad) break;
    for (const auto member : movable_members(bucket)) others.movable.push_back(bucket.layout.parameter(member));
  }
  others.measured_rows = rows_of(others.all, measure_locally_);
  return others;
}

void Buckets::become(Others others) {
  buckets_ = std::move(others.all);
  places_ = std::move(others.places);
  movable_ = std::move(others.movable);
  measured_rows_ = std::move(others.measured_rows);
}

void Buckets::set_measure_locally(bool measure) {
  measured_rows_ = rows_of(buckets_, measure);
  measure_locally_ = measure;
}

Buckets::RowsByDevice Buckets::rows_of(std::vector<Bucket>& buckets, bool measure) {
  RowsByDevice all_rows;
  for (auto& bucket : buckets) {
    bucket.local_sums.reset();
    if (!measure) continue;
    auto& rows = all_rows[bucket.device()];
    if (rows == nullptr) rows = std::make_shared<MeasuredRows>(bucket.device());
    bucket.local_sums.emplace(bucket.layout.lengths(), rows);
  }
  return all_rows;
}

void Buckets::reset() {
  for (const auto& [device, rows] : measured_rows_) rows->reset();
  for (auto& bucket : buckets_) {
    bucket.window.reset();
    if (bucket.local_sums) bucket.local_sums->reset();
  }
}

at::Tensor Buckets::measure() {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> pairs{at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device()))};
  for (auto& bucket : buckets_) {
    for (const auto& measured : fastddp::measure(bucket)) {
      keep_for_current_stream(measured);
      pairs.push_back(add_up(measured).to(device()));
    }
  }
  for (const auto parameter : sparse_) {
    const auto& sparse = gradient(parameter);
    if (sparse.defined()) pairs.push_back(add_up(measure_with_operators(sparse.values())).to(device()));
  }
  return at::stack(pairs).sum(0);
}

void Buckets::place_gradients() {
  for (const auto parameter : std::exchange(movable_, {})) tell(parameter, &move_in);
  if (!form_.in_main_grad) return;
  for (auto& bucket : buckets_) {
    for (size_t member = 0; member < bucket.size(); ++member) place_main(bucket, member);
  }
  // Main gradients of parameters in no bucket leave wires that are gone.
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const auto& gradient = holders_[parameter].grad();
    const bool is_alone = !gradient.defined() || gradient.storage().nbytes() == gradient.nbytes();
    if (has(parameter) || is_alone) continue;
    take_memory_of(gradient, empty_gradient(parameters_[parameter], gradient.scalar_type()).copy_(gradient));
  }
}

std::string Buckets::describe(size_t parameter) const {
  std::ostringstream text;
  text << "parameter " << names_[parameter] << " (number " << parameter << ", ";
  if (has(parameter)) text << "bucket " << places_[parameter].bucket << ")";
  if (!has(parameter)) text << (is_sparse(parameter) ? "sparse)" : "in no bucket)");
  return text.str();
}

}  // namespace fastddp
