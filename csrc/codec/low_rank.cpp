// PowerSGD: leg 0 is P and the uncompressed rest, leg 1 is Q.
#include <ATen/ops/_foreach_add.h>

#include <numeric>
#include <utility>

#include "bucket/bucket_range.h"
#include "codec/low_rank_parts.h"

namespace fastddp {
namespace {

class LowRank : public Codec {
 public:
  LowRank(LowRankOptions options, LowRankMemory memory)
      : options_(options), memory_(std::move(memory)), window_(options.first_window) {}

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>&) override {
    parts_.clear();
    for (auto* bucket : buckets) {
      bucket->set_wire_format({bucket->layout.gradient_dtype()});
      bucket->wire.disable();
      parts_.emplace_back(*bucket, options_, memory_);
    }
  }

  size_t legs() const override { return 2; }

  std::optional<Format> format(size_t leg, const Bucket& bucket) const override {
    return Format{options_.wire.value_or(bucket.layout.gradient_dtype()), parts_[bucket.index()].elements[leg]};
  }

  void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor&) override {
    auto& parts = of(bucket);
    leg == 0 ? parts.place_first(bucket, wire) : parts.place_q(wire);
  }

  void displace(const Bucket& bucket) override { parts_[bucket.index()].leave_wires(); }

  void on_gradient(Bucket& bucket, size_t member, double scale) override {
    if (!bucket.kernels->pack_on_arrival() || options_.batched) return;
    auto& parts = of(bucket);
    for (size_t i = 0; i < parts.compressed.size(); ++i) {
      if (parts.compressed[i] == member) compress(bucket, {i}, scale);
    }
  }

  void encode(size_t leg, Bucket& bucket, double scale) override { leg == 0 ? make_p(bucket, scale) : make_q(bucket, scale); }

  void decode(Bucket& bucket) override {
    auto& parts = of(bucket);
    const BucketRange range("unpack", bucket, 1);
    receive_q(bucket);
    const auto measured = parts.low_rank->reconstruct(parts.matrices);
    if (!options_.batched) bucket.window.measured.push_back(measured);
    if (options_.batched) {
      const auto all = parts.matrices.front().memory.view(-1);
      all.narrow(0, bucket.layout.numbers(), all.numel() - bucket.layout.numbers()).zero_();  // the padding has no error
      bucket.unpack(parts.result);
    } else {
      parts.flat.write_back();
      for (const auto member : parts.compressed) bump_version(bucket.gradient(member));
    }
    prepare_q(bucket);
    for (const auto& gradient : gradients_of(bucket)) bucket.window.kept.add(gradient);
    for (const auto& tensor : parts.used_by_the_side_stream()) keep_for_current_stream(tensor);
    parts.let_gradients_go();
  }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override {
    auto& parts = of(bucket);
    if (options_.batched) return bucket.measure_gradients();
    if (!std::exchange(parts.rest_is_measured, true)) measure_rest(bucket, parts);
    return bucket.window.measured;
  }

  // Note [A failed window of PowerSGD]
  // The factors Q have to stay equal on all ranks. If a window fails on all ranks, each restores the errors and Q from the start
  // of the step. If one rank alone failed, it sends zeros for P and Q, receives the others' sums, and goes on with their Q.
  // It sends NaN for the uncompressed rest, so that the others notice.
  void fill_void(size_t leg, const Bucket& bucket, const at::Tensor& place, double value) const override {
    const auto rest = leg == 0 ? parts_[bucket.index()].rest_elements : 0;
    place.zero_();
    place.narrow(0, place.numel() - rest, rest).fill_(value);
  }

  void recover(Bucket& bucket) override {
    auto& parts = of(bucket);
    std::vector<size_t> all(parts.matrices.size());
    std::iota(all.begin(), all.end(), size_t{0});
    parts.keep_q(all);
    receive_q(bucket);
    prepare_q(bucket);
  }

  void discard(Bucket& bucket, size_t member) override { of(bucket).discard(bucket, member); }

  void keep() override {
    for (auto& parts : parts_) parts.step_begins();
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& parts : parts_) parts.undo(only_if);
  }

 private:
  LowRankParts& of(const Bucket& bucket) { return parts_[bucket.index()]; }

  // ---------------------------------------------------------------------------------------------------- the stages

  void make_p(Bucket& bucket, double scale) {
    const BucketRange range("pack", bucket);
    auto& parts = of(bucket);
    bucket.wait_for_gradients();
    std::vector<size_t> left;  // matrices that did not start on arrival
    for (size_t i = 0; i < parts.compressed.size(); ++i) {
      if (!bucket.window[parts.compressed[i]].packed) left.push_back(i);
    }
    if (options_.batched) {
      compress_all(bucket, scale);
    } else if (!left.empty()) {
      compress(bucket, left, scale);
    }
    if (!parts.in_message) parts.p_kernels->pack(parts.p_slots, scale);
    std::vector<Slot> slots;
    for (size_t i = 0; i < parts.rest.size(); ++i) {
      slots.push_back({bucket.gradient(parts.rest[i]), parts.rest_views[i], parts.rest[i]});
    }
    if (!slots.empty()) bucket.kernels->pack(slots, scale, 0, bucket.sums_of_packed(slots));
  }

  // The matrices `which` of the bucket.
  void compress(Bucket& bucket, const std::vector<size_t>& which, double scale) {
    auto& parts = of(bucket);
    std::vector<LowRankMatrix> matrices;
    std::vector<size_t> members;
    for (const auto i : which) members.push_back(parts.compressed[i]);
    bucket.measure_local(members);
    parts.keep_errors(bucket, which);
    for (const auto i : which) {
      const auto member = parts.compressed[i];
      auto& matrix = parts.matrices[i];
      const auto flat = parts.flat.of(bucket, member, bucket.layout.gradient_dtype());
      matrix.gradient = flat.view({matrix.p.size(0), matrix.q.size(1)});
      bucket.window[member].packed = true;
      matrices.push_back(matrix);
    }
    parts.low_rank->compress(matrices, parts.in_message ? scale : 1.0);
  }

  // Compresses the bucket as one square, padded with zeros.
  void compress_all(Bucket& bucket, double scale) {
    bucket.measure_local();
    auto& parts = of(bucket);
    auto& matrix = parts.matrices.front();
    parts.keep_errors(bucket, {0});
    if (!matrix.before.is_same(matrix.memory)) matrix.memory.copy_(matrix.before);
    if (!options_.error_feedback) matrix.memory.zero_();
    const auto all = matrix.memory.view(-1);
    std::vector<at::Tensor> errors, gradients;
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& gradient = bucket.gradient(member);
      if (!gradient.defined()) continue;
      errors.push_back(bucket.layout.view(all, member));
      gradients.push_back(gradient);
      bucket.window[member].packed = true;
    }
    if (!errors.empty()) at::_foreach_add_(errors, gradients);
    const LowRankMatrix already_added{{}, matrix.memory, matrix.p, matrix.q, matrix.memory};
    parts.low_rank->compress({already_added}, parts.in_message ? scale : 1.0);
  }

  void make_q(Bucket& bucket, double scale) {
    const BucketRange range("project", bucket, 1);
    auto& parts = of(bucket);
    if (!parts.in_message) parts.p_kernels->unpack(parts.p_slots, false);
    receive_rest(bucket);
    std::vector<Basis> bases;
    for (const auto& matrix : parts.matrices) bases.push_back({matrix.p, 0});
    parts.low_rank->orthogonalise(bases, options_.epsilon, std::nullopt);
    parts.low_rank->project(parts.projections(), parts.in_message ? scale : 1.0);
    if (!parts.in_message) parts.q_kernels->pack(parts.q_slots, scale);
  }

  void receive_rest(Bucket& bucket) {
    auto& parts = of(bucket);
    std::vector<Slot> slots;
    for (size_t i = 0; i < parts.rest.size(); ++i) {
      slots.push_back({bucket.gradient_to_write(parts.rest[i]), parts.rest_views[i]});
    }
    const auto measured = slots.empty() ? at::Tensor() : bucket.kernels->unpack(slots, true);
    if (measured.defined()) bucket.window.measured.push_back(measured);
    parts.rest_is_measured = measured.defined() || slots.empty();
  }

  static void measure_rest(Bucket& bucket, const LowRankParts& parts) {
    if (parts.rest_wire.defined()) return bucket.window.measured.push_back(bucket.kernels->measure(parts.rest_wire));
    // Note [Lent wires], bucket/wire.h.
    for (const auto member : parts.rest) {
      const auto& gradient = bucket.held(member);
      if (gradient.defined()) bucket.window.measured.push_back(measure_with_operators(gradient));
    }
  }

  void receive_q(Bucket& bucket) {
    auto& parts = of(bucket);
    parts.q_kernels->unpack(parts.q_slots, false);
  }

  // Prepares Q for the next window.
  void prepare_q(Bucket& bucket) {
    if (bucket.index() == 0) ++window_;
    auto& parts = of(bucket);
    std::vector<Basis> bases;
    for (size_t i = 0; i < parts.matrices.size(); ++i) {
      if (!options_.warm_start) parts.matrices[i].q.zero_();  // so every vector is drawn anew
      bases.push_back({parts.matrices[i].q.t(), parts.numbers[i]});
    }
    // Each window has its own seed, the same on all ranks.
    parts.low_rank->orthogonalise(bases, options_.epsilon, options_.seed * 1000003 + window_);
  }

  // This window's gradients and their copies.
  std::vector<at::Tensor> gradients_of(const Bucket& bucket) const {
    std::vector<at::Tensor> tensors;
    for (size_t member = 0; member < bucket.size(); ++member) tensors.push_back(bucket.gradient(member));
    for (const auto& copy : parts_[bucket.index()].flat.copies()) tensors.push_back(copy);
    return tensors;
  }

  const LowRankOptions options_;
  const LowRankMemory memory_;
  std::vector<LowRankParts> parts_;  // by bucket
  uint64_t window_;                  // counts ended windows; a window counts when its first bucket has ended
};

}  // namespace

std::unique_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory) {
  return std::make_unique<LowRank>(options, std::move(memory));
}

}  // namespace fastddp
