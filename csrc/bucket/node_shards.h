// Which part of each bucket's wire belongs to which rank of a node.
#pragma once

#include <string>
#include <vector>

#include "bucket/buckets.h"

namespace fastddp {

// Note [Shards of a node]
// Where nodes exchange gradients, each rank of a node exchanges a part of every bucket: a *run* of the bucket's wire, which
// the ranks of the node have added up. To the exchange between nodes it is a bucket like any other. Its members are slices of
// parameters, and for each slice something stands in for a parameter: a tensor of the slice's shape and dtype, whose gradient
// is that part of the wire. Ranks in the same place of their nodes have the same slices.
//
// A run has the same length on each rank, in multiples of 64 bytes, and cuts through parameters. Where an exchange needs
// `whole` parameters, because it takes gradients for matrices, a run has the members of a part of the bucket, its length is
// what they make of it, and the longest run goes to the rank with the least up to then.
class NodeShards {
 public:
  struct Run {
    int64_t begin;  // elements of the wire
    int64_t end;
    int64_t length() const { return end - begin; }
  };
  struct Slice {
    size_t parameter;  // its number in the model
    int64_t begin;     // elements, in the order of the parameter's memory
    int64_t end;
  };

  // `ranks` of the node, of which this one is number `rank`.
  NodeShards(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan, size_t ranks,
             size_t rank, bool whole);

  size_t ranks() const { return ranks_; }
  size_t rank() const { return rank_; }

  // What the bucket's wire has to be.
  WireFormat format_of(const Layout& layout) const;
  // Whether this was made for such buckets.
  bool fit(const std::vector<Bucket>& buckets) const;
  // By rank of the node.
  const std::vector<Run>& runs(size_t bucket) const { return runs_[bucket]; }
  // What stands in for parameters, and what it is called: by number of the slice.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Slice>& slices() const { return slices_; }
  // Elements from the begin of the run.
  const std::vector<int64_t>& offsets() const { return offsets_; }
  // The slices of each bucket, at least one; one without elements where this rank's run has none.
  const Plan& plan() const { return plan_; }
  // The bucket that the exchange between nodes has: its gradients are held by boxes.
  Bucket make_bucket(size_t index) const;

 private:
  void add_slices(const Layout& layout);
  void add(const Layout& layout, size_t member, int64_t begin, int64_t end, int64_t offset);

  const size_t ranks_;
  const size_t rank_;
  const bool whole_;
  const Plan buckets_;
  std::vector<std::vector<Run>> runs_;
  std::vector<Slice> slices_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<int64_t> offsets_;
  Plan plan_;
};

}  // namespace fastddp
