// Which part of each bucket's wire belongs to which rank of a node.
#pragma once

#include <string>
#include <vector>

#include "bucket/buckets.h"

namespace fastddp {

// Note [Shards of a node]
// Between nodes, each rank of a node exchanges a part of every bucket: a *run* of the bucket's wire, which the ranks of the node
// have added up. To that exchange the run is a bucket, whose members are spans of parameters. Ranks in the same place of their
// nodes have the same spans.
//
// A run has the same length on each rank, in multiples of 64 bytes, and cuts through parameters. An exchange that takes gradients
// for matrices needs `whole` parameters. Then a run consists of whole members, so runs differ in length, and the longest run of a
// bucket goes to the rank that has the least so far.
class NodeShards {
 public:
  struct Run {
    int64_t begin;  // elements of the wire
    int64_t end;
    int64_t length() const { return end - begin; }
  };

  // This rank is number `rank` of the node's `ranks`.
  NodeShards(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan, size_t ranks,
             size_t rank, bool whole);

  size_t ranks() const { return ranks_; }
  c10::Device device() const { return members_.front().front().like.device(); }

  // The format that the bucket's wire must have.
  WireFormat format_of(const Layout& layout) const;
  // Whether the runs were made for these buckets.
  bool fit(const std::vector<Bucket>& buckets) const;
  // By rank of the node.
  const std::vector<Run>& runs(size_t bucket) const { return runs_[bucket]; }
  // This rank's.
  const Run& run(size_t bucket) const { return runs_[bucket][rank_]; }
  // Where each member of this rank's run begins in the run. There is at least one member: an empty run has one without elements.
  const std::vector<int64_t>& offsets(size_t bucket) const { return offsets_[bucket]; }
  // This rank's spans, of all buckets.
  std::vector<Span> spans() const;
  // The bucket for the exchange between nodes. Empty tensors hold its gradients.
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
