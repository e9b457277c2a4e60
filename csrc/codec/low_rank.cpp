// PowerSGD: leg 0 is P and the uncompressed rest, leg 1 is Q.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "bucket/bucket_range.h"
#include "codec/codec.h"
#include "codec/flat_gradients.h"
#include "codec/kept.h"

namespace fastddp {
namespace {

// A matrix's error and Q when the step began. Copied when a window first changes them.
struct Kept {
  at::Tensor error, q;  // error: undefined without error feedback
  bool is_there = false;
  bool of_this_window = false;
};

// A bucket's matrices and rest. All tensors but the gradients stay the same from window to window.
struct Parts {
  std::vector<size_t> compressed;       // members, in the order of `matrices`; batched: all
  std::vector<LowRankMatrix> matrices;  // batched: one
  std::vector<Kept> before_step;        // by matrix
  std::vector<uint64_t> numbers;        // of the matrices: parameters; batched: the bucket
  std::vector<size_t> rest;             // uncompressed members
  int64_t rest_elements = 0;
  std::array<int64_t, 2> elements{};  // of the wire, by leg
  at::Tensor rest_wire;
  std::vector<at::Tensor> rest_views;
  at::Tensor result;                   // batched: the new gradients, flat
  std::vector<Slot> p_slots, q_slots;  // from the factors to their places in the wires
  FlatGradients flat;                  // this window's
  bool rest_is_measured = false;
  std::unique_ptr<LowRankKernels> low_rank;
  std::unique_ptr<Kernels> p_kernels, q_kernels;  // one each, since each remembers one set of addresses

  void leave_wires() {
    rest_wire.reset();
    rest_views.clear();
    p_slots.clear();
    q_slots.clear();
  }
};

int64_t elements(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.is_complex() ? 2 : 1);
}

class LowRank : public Codec {
 public:
  LowRank(LowRankOptions options, LowRankMemory memory)
      : options_(options), memory_(std::move(memory)), window_(options.first_window) {}

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>&) override {
    parts_ = std::vector<Parts>(buckets.empty() ? 0 : buckets.back()->index() + 1);
    first_ = buckets.empty() ? 0 : buckets.front()->index();
    for (auto* bucket : buckets) {
      bucket->set_wire_format({bucket->layout.gradient_dtype(), Placing::without_gaps});
      bucket->wire.do_without();
      parts_[bucket->index()] = split(*bucket);
    }
  }

  size_t legs() const override { return 2; }

  std::optional<Format> format(size_t leg, const Bucket& bucket) const override {
    return Format{options_.wire.value_or(bucket.layout.gradient_dtype()), parts_[bucket.index()].elements[leg]};
  }

  void place(size_t leg, const Bucket& bucket, const at::Tensor& wire, const at::Tensor&) override {
    auto& parts = parts_[bucket.index()];
    leg == 0 ? place_first(bucket, parts, wire) : place_q(parts, wire);
  }

  void displace(const Bucket& bucket) override { parts_[bucket.index()].leave_wires(); }

  void on_gradient(Bucket& bucket, size_t member, double) override {
    if (!bucket.kernels->pack_on_arrival() || options_.batched) return;
    auto& parts = parts_[bucket.index()];
    for (size_t i = 0; i < parts.compressed.size(); ++i) {
      if (parts.compressed[i] == member) compress(bucket, {i});
    }
  }

  void encode(size_t leg, Bucket& bucket, double scale) override {
    leg == 0 ? make_p(bucket, scale) : make_q(bucket, scale);
  }

  void decode(Bucket& bucket) override {
    auto& parts = parts_[bucket.index()];
    const BucketRange range("unpack", bucket, 1);
    receive_q(bucket);
    const auto measured = parts.low_rank->reconstruct(parts.matrices);
    if (!options_.batched) bucket.window.measured.push_back(measured);
    if (options_.batched) {
      const auto all = parts.matrices.front().memory.view(-1);
      all.narrow(0, bucket.layout.numbers(), all.numel() - bucket.layout.numbers())
          .zero_();  // the padding has no error
      bucket.unpack(parts.result);
    } else {
      parts.flat.write_back();
      for (const auto member : parts.compressed) bump_version(bucket.gradient(member));
    }
    prepare_q(bucket);
    for (const auto& gradient : gradients_of(bucket)) bucket.window.kept.add(gradient);
    for (const auto& tensor : used_by_the_side_stream(bucket)) keep_for_current_stream(tensor);
    let_gradients_go(parts);
  }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override {
    auto& parts = parts_[bucket.index()];
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
    auto& parts = parts_[bucket.index()];
    std::vector<size_t> all(parts.matrices.size());
    std::iota(all.begin(), all.end(), size_t{0});
    keep_first(parts, all);
    receive_q(bucket);
    prepare_q(bucket);
  }

  // The result will be dropped, so the error gets back what went into it.
  void discard(Bucket& bucket, size_t member) override {
    if (!options_.error_feedback) return;
    const auto& parts = parts_[bucket.index()];
    const auto& result = bucket.gradient(member);
    for (size_t i = 0; i < parts.matrices.size(); ++i) {
      const auto& [error, q, is_there, of_this_window] = parts.before_step[i];
      if (!is_there || (!options_.batched && parts.compressed[i] != member)) continue;
      const auto own = [&](const at::Tensor& square) {
        return options_.batched ? bucket.layout.view(square.view(-1), member) : square;
      };
      const auto memory = own(parts.matrices[i].memory);
      if (of_this_window) {
        memory.copy_(own(error));
      } else {
        memory.add_(result.as_strided(memory.sizes(), memory.strides()));
      }
    }
  }

  void keep() override {
    for (auto& parts : parts_) {
      for (auto& kept : parts.before_step) kept.is_there = false;
    }
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& parts : parts_) undo(parts, only_if);
  }

 private:
  // ------------------------------------------------------------------------------------------------- preparation

  Parts split(const Bucket& bucket) const {
    Parts parts;
    const auto compute = bucket.layout.gradient_dtype() == at::kDouble ? at::kDouble : at::kFloat;
    const auto options = at::TensorOptions().dtype(compute).device(bucket.device());
    const auto add = [&](const at::Tensor& error, const at::Tensor& q, int64_t rows, uint64_t number) {
      parts.matrices.push_back({{}, error, at::empty({rows, q.size(0)}, options), q});
      parts.before_step.push_back({options_.error_feedback ? at::empty_like(error) : at::Tensor(), at::empty_like(q)});
      parts.numbers.push_back(number);
    };
    if (options_.batched) {
      for (size_t member = 0; member < bucket.size(); ++member) parts.compressed.push_back(member);
      const auto& square = memory_.of_buckets.at(bucket.index());
      add(square.error, square.q, square.q.size(1), bucket.index());
      parts.result = at::empty({square.error.numel()}, square.error.options());
      parts.matrices.back().gradient = parts.result.view_as(square.error);
    }
    for (size_t member = 0; member < bucket.size() && !options_.batched; ++member) {
      const auto& [error, q] = memory_.of_parameters.at(bucket.layout.parameter(member));
      if (q.defined()) {
        parts.compressed.push_back(member);
        add(error, q, bucket.layout[member].like.numel() / q.size(1), bucket.layout.parameter(member));
      } else {
        parts.rest.push_back(member);
        parts.rest_elements += elements(bucket.layout[member].like);
      }
    }
    parts.elements[0] = parts.rest_elements;
    for (const auto& matrix : parts.matrices) {
      parts.elements[0] += matrix.p.numel();
      parts.elements[1] += matrix.q.numel();
    }
    parts.low_rank = make_low_rank_kernels(bucket.device());
    parts.p_kernels = make_kernels(bucket.device());
    parts.q_kernels = make_kernels(bucket.device());
    return parts;
  }

  static void place_first(const Bucket& bucket, Parts& parts, const at::Tensor& wire) {
    int64_t offset = 0;
    parts.p_slots.clear();
    parts.rest_views.clear();
    for (const auto& matrix : parts.matrices) {
      parts.p_slots.push_back({matrix.p, wire.narrow(0, offset, matrix.p.numel()).view_as(matrix.p)});
      offset += matrix.p.numel();
    }
    parts.rest_wire = wire.narrow(0, offset, wire.numel() - offset);
    for (const auto member : parts.rest) {
      parts.rest_views.push_back(view_of(wire, bucket.layout[member].like, offset));
      offset += elements(bucket.layout[member].like);
    }
  }

  static void place_q(Parts& parts, const at::Tensor& wire) {
    int64_t offset = 0;
    parts.q_slots.clear();
    for (const auto& matrix : parts.matrices) {
      parts.q_slots.push_back({matrix.q, wire.narrow(0, offset, matrix.q.numel()).view_as(matrix.q)});
      offset += matrix.q.numel();
    }
  }

  // ---------------------------------------------------------------------------------------------------- the stages

  void make_p(Bucket& bucket, double scale) {
    const BucketRange range("pack", bucket);
    auto& parts = parts_[bucket.index()];
    bucket.wait_for_gradients();
    std::vector<size_t> left;  // matrices that did not start on arrival
    for (size_t i = 0; i < parts.compressed.size(); ++i) {
      if (!bucket.window[parts.compressed[i]].packed) left.push_back(i);
    }
    if (options_.batched) {
      compress_all(bucket);
    } else if (!left.empty()) {
      compress(bucket, left);
    }
    parts.p_kernels->pack(parts.p_slots, scale);
    std::vector<Slot> slots;
    for (size_t i = 0; i < parts.rest.size(); ++i) {
      slots.push_back({bucket.gradient(parts.rest[i]), parts.rest_views[i], parts.rest[i]});
    }
    if (!slots.empty()) bucket.kernels->pack(slots, scale, 0, bucket.sums_of_packed(slots));
  }

  // The matrices `which` of the bucket.
  void compress(Bucket& bucket, const std::vector<size_t>& which) {
    auto& parts = parts_[bucket.index()];
    std::vector<LowRankMatrix> matrices;
    std::vector<size_t> members;
    for (const auto i : which) members.push_back(parts.compressed[i]);
    bucket.measure_local(members);
    for (const auto i : which) {
      const auto member = parts.compressed[i];
      auto& matrix = parts.matrices[i];
      const auto flat = parts.flat.of(bucket, member, bucket.layout.gradient_dtype());
      matrix.gradient = flat.view({matrix.p.size(0), matrix.q.size(1)});
      bucket.window[member].packed = true;
      matrices.push_back(matrix);
    }
    keep_first(parts, which);
    parts.low_rank->compress(matrices, 1.0);
  }

  // Compresses the bucket as one square, padded with zeros.
  void compress_all(Bucket& bucket) {
    bucket.measure_local();
    auto& parts = parts_[bucket.index()];
    auto& matrix = parts.matrices.front();
    keep_first(parts, {0});
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
    const LowRankMatrix already_added{{}, matrix.memory, matrix.p, matrix.q};
    parts.low_rank->compress({already_added}, 1.0);
  }

  void make_q(Bucket& bucket, double scale) {
    const BucketRange range("project", bucket, 1);
    auto& parts = parts_[bucket.index()];
    parts.p_kernels->unpack(parts.p_slots, false);
    receive_rest(bucket);
    std::vector<Basis> bases;
    for (const auto& matrix : parts.matrices) bases.push_back({matrix.p, 0});
    parts.low_rank->orthogonalise(bases, options_.epsilon, std::nullopt);
    parts.low_rank->project(parts.matrices, 1.0);
    parts.q_kernels->pack(parts.q_slots, scale);
  }

  void receive_rest(Bucket& bucket) {
    auto& parts = parts_[bucket.index()];
    std::vector<Slot> slots;
    for (size_t i = 0; i < parts.rest.size(); ++i) {
      slots.push_back({bucket.gradient_to_write(parts.rest[i]), parts.rest_views[i]});
    }
    const auto measured = slots.empty() ? at::Tensor() : bucket.kernels->unpack(slots, true);
    if (measured.defined()) bucket.window.measured.push_back(measured);
    parts.rest_is_measured = measured.defined() || slots.empty();
  }

  static void measure_rest(Bucket& bucket, const Parts& parts) {
    if (parts.rest_wire.defined()) return bucket.window.measured.push_back(bucket.kernels->measure(parts.rest_wire));
    // Note [Lent wires], bucket/wire.h.
    for (const auto member : parts.rest) {
      const auto& gradient = bucket.held(member);
      if (gradient.defined()) bucket.window.measured.push_back(measure_with_operators(gradient));
    }
  }

  void receive_q(Bucket& bucket) {
    auto& parts = parts_[bucket.index()];
    parts.q_kernels->unpack(parts.q_slots, false);
  }

  // Prepares Q for the next window.
  void prepare_q(Bucket& bucket) {
    if (bucket.index() == first_) ++window_;
    auto& parts = parts_[bucket.index()];
    std::vector<Basis> bases;
    for (size_t i = 0; i < parts.matrices.size(); ++i) {
      if (!options_.warm_start) parts.matrices[i].q.zero_();  // so every vector is drawn anew
      bases.push_back({parts.matrices[i].q.t(), parts.numbers[i]});
    }
    // Each window has its own seed, the same on all ranks.
    parts.low_rank->orthogonalise(bases, options_.epsilon, options_.seed * 1000003 + window_);
  }

  void let_gradients_go(Parts& parts) const {
    parts.flat.let_go();
    if (options_.batched) return;
    for (auto& matrix : parts.matrices) matrix.gradient.reset();
  }

  // This window's gradients and their copies.
  std::vector<at::Tensor> gradients_of(const Bucket& bucket) const {
    std::vector<at::Tensor> tensors;
    for (size_t member = 0; member < bucket.size(); ++member) tensors.push_back(bucket.gradient(member));
    for (const auto& copy : parts_[bucket.index()].flat.copies()) tensors.push_back(copy);
    return tensors;
  }

  // Tensors that live as long as this object.
  std::vector<at::Tensor> used_by_the_side_stream(const Bucket& bucket) const {
    const auto& parts = parts_[bucket.index()];
    std::vector<at::Tensor> tensors{parts.result};
    for (const auto& matrix : parts.matrices) tensors.insert(tensors.end(), {matrix.p, matrix.q, matrix.memory});
    for (const auto& kept : parts.before_step) tensors.insert(tensors.end(), {kept.error, kept.q});
    return tensors;
  }

  // The window is about to change the matrices `which`. Copies those that this step has not changed before.
  static void keep_first(Parts& parts, const std::vector<size_t>& which) {
    std::vector<at::Tensor> kept, now;
    for (const auto i : which) {
      auto& [error, q, is_there, of_this_window] = parts.before_step[i];
      of_this_window = !is_there;
      if (std::exchange(is_there, true)) continue;
      kept.push_back(q);
      now.push_back(parts.matrices[i].q);
      if (!error.defined()) continue;
      kept.push_back(error);
      now.push_back(parts.matrices[i].memory);
    }
    if (!kept.empty()) at::_foreach_copy_(kept, now);
  }

  void undo(Parts& parts, const at::Tensor& only_if) const {
    for (size_t i = 0; i < parts.matrices.size(); ++i) {
      const auto& matrix = parts.matrices[i];
      // Of a window that failed.
      if (matrix.gradient.defined()) keep_for_current_stream(matrix.gradient);
      if (!parts.before_step[i].is_there) continue;
      bring_back(matrix.q, parts.before_step[i].q, only_if);
      if (options_.error_feedback) bring_back(matrix.memory, parts.before_step[i].error, only_if);
      if (!only_if.defined()) parts.before_step[i].is_there = false;
    }
    let_gradients_go(parts);
  }

  const LowRankOptions options_;
  const LowRankMemory memory_;
  std::vector<Parts> parts_;  // by bucket, up to this codec's last one; empty for another codec's buckets
  size_t first_ = 0;          // this codec's first bucket
  uint64_t window_;           // counts ended windows; a window counts when its first bucket has ended
};

}  // namespace

std::unique_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory) {
  return std::make_unique<LowRank>(options, std::move(memory));
}

}  // namespace fastddp
