// The buckets of a plan, and where in them each parameter's gradient is.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// The parameters of each bucket, in the order of collectives.
using Plan = std::vector<std::vector<size_t>>;

class Buckets {
 public:
  // `sparse`: parameters whose gradients are sparse tensors, which travel in no bucket.
  Buckets(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<size_t> sparse,
          bool gradient_as_bucket_view);

  // Replaces the buckets. Each parameter is in exactly one; in none, if it is sparse or `may_be_missing`. Returns the
  // parameters whose gradients lived in a wire that goes: move_in().
  std::vector<size_t> replace(Plan plan, const std::function<bool(size_t)>& may_be_missing);
  // Into the wires of the buckets that there are now.
  void move_in(const std::vector<size_t>& parameters);
  // Of each bucket: its wire, and by member where the gradient begins in it and how many elements it has there.
  struct WireLayout {
    c10::ScalarType dtype;
    c10::Device device;
    std::vector<std::pair<size_t, size_t>> members;
  };
  std::vector<WireLayout> wire_layouts() const;
  // Begins a window.
  void reset();

  // Note [Local sums], pack/local_sums.h: from the next window on.
  void set_measure_locally(bool measure);
  bool measure_locally() const { return measure_locally_; }

  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t bucket) { return buckets_[bucket]; }

  struct Place {
    size_t bucket;
    size_t member;
  };
  bool has(size_t parameter) const { return place(parameter).bucket < buckets_.size(); }
  const Place& place(size_t parameter) const { return places_[parameter]; }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const at::Tensor& gradient(size_t parameter) const { return parameters_[parameter].grad(); }
  const std::string& name(size_t parameter) const { return names_[parameter]; }
  // The parameter in errors.
  std::string describe(size_t parameter) const;
  const std::vector<size_t>& sparse() const { return sparse_; }
  bool is_sparse(size_t parameter) const;
  bool gradient_as_bucket_view() const { return gradient_as_bucket_view_; }
  // Of the first parameter: where what belongs to no bucket is done.
  c10::Device device() const { return parameters_.front().device(); }
  const SideStreams& side_streams() const { return side_streams_; }
  // A bucket beside those of the plan: number `beyond` of `count`.
  Bucket make_another(size_t beyond, size_t count, std::vector<size_t> members) const;

 private:
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const std::vector<size_t> sparse_;
  const bool gradient_as_bucket_view_;
  bool measure_locally_ = false;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter; in no bucket: `bucket` is their number
  SideStreams side_streams_;
};

}  // namespace fastddp
