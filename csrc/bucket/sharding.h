// Which part of each bucket's wire belongs to which rank of a group.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// Note [Shards]
// Each rank of a group has a part of every bucket: a *run* of the bucket's wire, which the ranks add up for it. Its members are
// spans of parameters. There are two uses:
// - Between nodes, the ranks of a node exchange a run each (note [Two levels of a bucket], trip/way.h). Ranks in the same place
//   of their nodes have the same spans.
// - A sharded optimizer steps with its rank's spans alone (note [Sharded gradients], shard.h).
//
// A run has the same length on each rank, in multiples of 64 bytes, and cuts through parameters. Who takes gradients for matrices
// needs `whole` parameters. Then a run consists of whole members, so runs differ in length, and the longest run of a bucket goes
// to the rank that has the least so far. An optimizer's runs and members begin at multiples of `Units`, so that their places are the
// same whatever travels.
class Sharding {
 public:
  struct Run {
    int64_t begin;  // elements of the wire
    int64_t end;
    int64_t length() const { return end - begin; }
  };
  // Numbers.
  struct Units {
    int64_t member;
    int64_t run;
  };

  // This rank is number `rank` of the group's `ranks`.
  Sharding(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan, size_t ranks,
           size_t rank, bool whole, std::optional<Units> of_optimizer = {});

  size_t ranks() const { return ranks_; }
  size_t buckets() const { return plan_.size(); }
  c10::Device device() const { return spans_.front().front().like.device(); }

  // The format that the bucket's wire must have between nodes.
  WireFormat format_of(const Layout& layout) const {
    const auto dtype = layout.gradient_dtype();
    const auto unit = whole_ ? 1 : ranks_ * kRunBytes / c10::elementSize(dtype);
    return {dtype, aligned(dtype), static_cast<int64_t>(unit)};
  }
  // The grid that it must have for an optimizer.
  Grid grid() const {
    if (!units_) return {};
    if (whole_) return {units_->run, units_->run};
    return {units_->member, static_cast<int64_t>(ranks_) * units_->run};
  }
  // Whether the runs were made for these buckets.
  bool fit(const std::vector<Bucket>& buckets) const {
    return std::ranges::equal(buckets, plan_, {}, [](const auto& bucket) { return bucket.layout.parameters(); });
  }
  // By rank of the group.
  const std::vector<Run>& runs(size_t bucket) const { return runs_[bucket]; }
  // A bucket's, as in the plan.
  const std::vector<size_t>& parameters(size_t bucket) const { return plan_[bucket]; }
  // Elements of a bucket's wire.
  int64_t length(size_t bucket) const { return lengths_[bucket]; }
  // Where each parameter of the bucket begins in the wire.
  const std::vector<size_t>& places(size_t bucket) const { return places_[bucket]; }
  // This rank's.
  const Run& run(size_t bucket) const { return runs_[bucket][rank_]; }
  // A bucket's runs in a wire, by rank. The wire may have elements of another kind, as bytes of blocks.
  std::vector<at::Tensor> cut(const at::Tensor& wire, size_t bucket) const;
  // This rank's, in their places in the bucket's wire. There is at least one: an empty run has one without elements.
  const std::vector<Span>& spans(size_t bucket) const { return spans_[bucket]; }

 private:
  static constexpr size_t kRunBytes = 64;  // a cache line of the CPU

  void add_spans(const Layout& layout);
  void add(const Layout& layout, size_t member, int64_t begin, int64_t end);

  const size_t ranks_;
  const size_t rank_;
  const bool whole_;
  const std::optional<Units> units_;  // none: not an optimizer's
  const Plan plan_;
  // By bucket.
  std::vector<int64_t> lengths_;
  std::vector<std::vector<size_t>> places_;
  std::vector<std::vector<Run>> runs_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace fastddp
