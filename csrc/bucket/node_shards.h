// Which part of each bucket's wire belongs to which rank of a node.
#pragma once

#include <string>
#include <vector>

#include "bucket/buckets.h"

namespace fastddp {

// Note [Shards of a node]
// Where nodes exchange gradients, each rank of a node exchanges a part of every bucket: a *run* of the bucket's wire, which
// the ranks of the node have added up. Its spans of parameters are a bucket to the exchange between nodes. Ranks in the same
// place of their nodes have the same spans.
//
// A run has the same length on each rank, in multiples of 64 bytes, and cuts through parameters. Where an exchange needs
// `whole` parameters, because it takes gradients for matrices, a run has the members of a part of the bucket. Its length is
// what they make of it, and the longest run goes to the rank with the least up to then.
class NodeShards {
 public:
  struct Run {
    int64_t begin;  // elements of the wire
    int64_t end;
    int64_t length() const { return end - begin; }
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
  // This rank's run of the bucket: by member, where it begins in the run. There is a member at least: one without elements
  // where the run has none.
  const std::vector<int64_t>& offsets(size_t bucket) const { return offsets_[bucket]; }
  // This rank's, of all buckets.
  std::vector<Span> spans() const;
  // What the exchange between nodes has: its gradients are held by boxes.
  Bucket make_bucket(size_t index) const;

 private:
  void add_spans(const Layout& layout);
  void add(const Layout& layout, size_t member, int64_t begin, int64_t end, int64_t offset);

  const size_t ranks_;
  const size_t rank_;
  const bool whole_;
  const Plan plan_;
  // By bucket.
  std::vector<std::vector<Run>> runs_;
  std::vector<std::vector<Member>> members_;
  std::vector<std::vector<int64_t>> offsets_;
};

}  // namespace fastddp
