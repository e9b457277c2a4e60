// The buckets of a plan, and where in them each parameter's gradient is.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "bucket/bucket.h"
#include "bucket/packing.h"
#include "bucket/placeholders.h"
#include "bucket/shard.h"

namespace fastddp {

class Buckets {
 public:
  // `sparse`: parameters whose gradients are sparse tensors and travel in no bucket.
  Buckets(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<size_t> sparse, GradientForm form);

  struct Place {
    size_t bucket;
    size_t member;
  };
  using RowsByDevice = std::unordered_map<c10::Device, std::shared_ptr<MeasuredRows>>;
  // Buckets of another plan: note [All or nothing], bucket.h.
  struct Others {
    std::vector<Bucket> all;
    std::vector<Place> places;
    std::vector<size_t> movable;
    RowsByDevice measured_rows;
  };
  // Each parameter is in exactly one bucket of the plan, or in none if it is sparse or `may_be_missing`.
  Others others(const Plan& plan, const std::function<bool(size_t)>& may_be_missing);
  // Replaces the buckets. Raises nothing.
  void become(Others others);
  // Whether these are the buckets of that plan.
  bool are(const Plan& plan) const {
    const auto parameters = [](const Bucket& bucket) { return bucket.layout.parameters(); };
    return !places_.empty() && std::ranges::equal(buckets_, plan, {}, parameters);
  }
  // Moves gradients into wires that are new: those that lived in wires that are gone, and main gradients (note [Main gradients],
  // gradient_memory.h). To be called when it is known what travels. Where it raises, the rest stays where it is, and travels from
  // there.
  void place_gradients();

  // By parameter.
  std::vector<at::Tensor> main_gradients() const {
    std::vector<at::Tensor> gradients;
    for (const auto& holder : holders_) gradients.push_back(holder.grad());
    return gradients;
  }
  // Calls this function of buckets for the parameter's gradient, if it is in one.
  template <typename... Arguments>
  void tell(size_t parameter, void (*function)(Bucket&, size_t, Arguments...), Arguments... arguments) {
    if (has(parameter)) function(buckets_[place(parameter).bucket], place(parameter).member, arguments...);
  }

  // Each rank gets the averages of its own spans only: note [Sharded gradients], shard.h.
  bool are_sharded() const { return !buckets_.empty() && buckets_.front().shard != nullptr; }
  // Note [What a gradient still holds], gradient_mark.h. In no bucket: there is no mark.
  void mark(size_t parameter) {
    if (!has(parameter)) return;
    const auto [bucket, member] = places_[parameter];
    buckets_[bucket].marks[member].set(gradient(parameter));
  }
  bool still_holds(size_t parameter) const {
    if (!has(parameter)) return gradient(parameter).defined();
    const auto [bucket, member] = places_[parameter];
    return buckets_[bucket].marks[member].still_holds(gradient(parameter));
  }

  // Begins a window.
  void reset();

  // Of averaged gradients: the sum of their squares and the number of elements that are not finite, in fp64, on device().
  at::Tensor measure();
  // Note [Local sums], pack/local_sums.h: from the next window on.
  void set_measure_locally(bool measure);
  bool measure_locally() const { return measure_locally_; }
  const RowsByDevice& measured_rows() const { return measured_rows_; }

  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t bucket) { return buckets_[bucket]; }

  bool has(size_t parameter) const { return place(parameter).bucket < buckets_.size(); }
  const Place& place(size_t parameter) const { return places_[parameter]; }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const at::Tensor& gradient(size_t parameter) const { return holders_[parameter].grad(); }
  // The same, or the gradient of this rank's span of it.
  at::Tensor own_gradient(size_t parameter) const {
    if (!are_sharded() || !has(parameter)) return gradient(parameter);
    const auto [bucket, member] = places_[parameter];
    return buckets_[bucket].shard->own_gradient(member, gradient(parameter));
  }
  c10::ScalarType gradient_dtype(size_t parameter) const { return form_.dtype_of(parameters_[parameter]); }
  const std::string& name(size_t parameter) const { return names_[parameter]; }
  // Names the parameter in errors.
  std::string describe(size_t parameter) const;
  const std::vector<size_t>& sparse() const { return sparse_; }
  bool is_sparse(size_t parameter) const { return std::ranges::find(sparse_, parameter) != sparse_.end(); }
  const GradientForm& form() const { return form_; }
  // The first parameter's device. Work that belongs to no bucket runs there.
  c10::Device device() const { return parameters_.front().device(); }
  const SideStreams& side_streams() const { return side_streams_; }
  // A bucket outside the plan: number `beyond` of `count` such buckets.
  Bucket make_another(size_t beyond, size_t count, const std::vector<size_t>& members) const {
    auto form = form_;
    form.as_bucket_view = false;
    return make(buckets_.size() + beyond, buckets_.size() + count, members, form);
  }

 private:
  Bucket make(size_t index, size_t count, const std::vector<size_t>& members, GradientForm form) const {
    std::vector<at::Tensor> holders;
    for (const auto parameter : members) holders.push_back(holders_[parameter]);
    return {Layout(index, count, members, parameters_, names_, form), std::move(holders)};
  }

  const std::vector<at::Tensor> parameters_;
  const std::vector<at::Tensor> holders_;  // by parameter; bucket.h
  const std::vector<std::string> names_;
  const std::vector<size_t> sparse_;
  const GradientForm form_;
  static RowsByDevice rows_of(std::vector<Bucket>& buckets, bool measure);

  bool measure_locally_ = false;
  RowsByDevice measured_rows_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;    // by parameter; in no bucket: `bucket` is buckets_.size()
  std::vector<size_t> movable_;  // parameters whose gradients lived in wires that are gone
  SideStreams side_streams_;
};

}  // namespace fastddp
