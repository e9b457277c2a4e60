// PowerSGD: leg 0 is P and the uncompressed rest, leg 1 is Q.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "bucket/gradient_memory.h"
#include "codec/codec.h"
#include "codec/kept.h"
#include "codec/rows.h"
#include "device/cuda_driver.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

// Note [Factors in the message]
// P and Q travel in the wire's dtype. Where that is the dtype in which they are computed, P is computed in the message itself,
// and stays there: ranks add it up in place, and it is used from there until the window ends. Q is computed in the message too,
// and then copied out, because it is also the next window's: together with what is not compressed, if that has the same dtype.
// Otherwise both have memory of their own, and are packed and unpacked.

// The gradient of a span; batched: of a bucket.
struct Matrix {
  size_t span;      // batched: 0
  uint64_t number;  // the parameter's; batched: the bucket's
  int64_t rows;
  at::Tensor p;  // undefined: it is in the message
  LowRankMemory::Matrix now;
  LowRankMemory::Matrix kept;  // when the step began, once a window has changed them; no error without error feedback
  bool has_kept_error = false;
  // This window.
  at::Tensor before = {};        // where its error is when it is compressed: note [Errors change places], kept.h
  at::Tensor error_before = {};  // if discard() may need it

  at::Tensor shaped(const at::Tensor& row) const { return row.view({rows, now.q.size(1)}); }
};

// Batched: the part of a square that is the span's.
at::Tensor part_of(const at::Tensor& square, const Span& span) {
  return view_of(square.view(-1), span.like, static_cast<size_t>(span.offset));
}

// One bucket. All tensors stay the same from window to window.
class LowRankBucket {
 public:
  LowRankBucket(Spans& spans, const LowRankOptions& options, const LowRankMemory& memory)
      : options_(options),
        wire_(options.wire.value_or(spans.dtype)),
        in_message_(wire_ == (spans.dtype == at::kDouble ? at::kDouble : at::kFloat)),
        place_of_(spans.all.size()),
        low_rank_(make_low_rank_kernels(spans.device)),
        p_kernels_(in_message_ ? nullptr : make_kernels(spans.device)),
        q_kernels_(make_kernels(spans.device)),
        gradient_kernels_(make_kernels(spans.device)) {
    if (options.batched) {
      const auto& square = memory.of_buckets.at(spans.bucket);
      add(square, square.q.size(1), 0, spans.bucket);
      result_ = at::empty({square.error.numel()}, square.error.options());
      return;
    }
    for (auto& span : spans.all) {
      const auto& matrix = memory.of_parameters.at(span.parameter);
      if (!matrix.q.defined()) {
        span.packs = true;
        rest_.push_back(span);
        rest_elements_ += span.length();
        continue;
      }
      place_of_[span.number] = matrices_.size();
      add(matrix, span.like.numel() / matrix.q.size(1), span.number, span.parameter);
    }
    for (size_t i = 0; i < rest_.size(); ++i) place_of_[rest_[i].number] = matrices_.size() + i;
    elements_[0] += rest_elements_;
  }

  std::vector<Leg> legs() const {
    return {{.dtype = wire_, .elements = elements_[0], .is_whole = options_.batched}, {wire_, elements_[1]}};
  }

  // Note [A failed window of PowerSGD]
  // The factors Q have to stay equal on all ranks. If a window fails on all ranks, each restores the errors and Q from the
  // start of the step. If one rank alone failed, it sends zeros for P and Q, receives the others' sums, and goes on with their
  // Q. It sends NaN for the uncompressed rest, so that the others notice.
  void fill_void(size_t leg, const at::Tensor& place, double value) const {
    place.zero_();
    if (leg == 0) rest_of(place).fill_(value);
  }

  // ---------------------------------------------------------------------------------------------------- the stages

  void make_p(const Spans& spans, Numbers which, Wires wires, double scale) {
    std::vector<size_t> compressed;
    std::vector<Slot> rest;
    for (const auto number : which) {
      const auto place = place_of_[number];
      if (place >= matrices_.size()) {
        rest.push_back({spans.all[number].gradient, places(0, wires)[place], number});
      } else if (compressed.empty() || compressed.back() != place) {  // batched: all are of one
        compressed.push_back(place);
      }
    }
    compress(spans, compressed, wires, scale);
    if (!rest.empty()) gradient_kernels_->pack(rest, scale, spans.call, spans.sums);
  }

  void make_q(const Spans& spans, Wires wires, double scale) {
    keep_q();
    if (!in_message_) p_kernels_->unpack(factors(0, wires), false);
    const auto slots = factors(1, wires);
    Rows rows;
    std::vector<LowRankMatrix> matrices;
    std::vector<Basis> bases;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const bool has_error = matrices_[i].now.error.defined();  // then M is there
      matrices.push_back(matrix(i, has_error ? at::Tensor() : to_read(rows, spans, i), wires));
      if (in_message_) matrices[i].q = slots[i].view;
      bases.push_back({matrices[i].p, 0});
    }
    low_rank_->orthogonalise(bases, options_.epsilon, std::nullopt);
    low_rank_->project(matrices, in_message_ ? scale : 1.0);
    if (!in_message_) q_kernels_->pack(slots, scale);
  }

  void receive(const Spans& spans, Wires wires, Seen& seen) {
    const bool together = in_message_ && wire_ == spans.dtype;
    auto slots = factors(1, wires);
    std::vector<Slot> rest;
    for (const auto& span : rest_) {
      (together ? slots : rest).push_back({spans.all[span.number].gradient, places(0, wires)[place_of_[span.number]]});
    }
    q_kernels_->unpack(slots, false);
    if (rest_.empty()) return;
    const auto values = rest_of(wires[0].sum());
    together ? seen.unread.push_back(values) : unpack(rest, values, seen);
  }

  void receive_q(Wires wires) { q_kernels_->unpack(factors(1, wires), false); }

  void reconstruct(const Spans& spans, Wires wires, Seen& seen) {
    Rows rows;
    std::vector<LowRankMatrix> matrices;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const auto& own = matrices_[i];
      const auto row = options_.batched ? result_ : rows.of(spans.all[own.span], spans.dtype, /*is_read=*/false);
      matrices.push_back(matrix(i, own.shaped(row), wires));
    }
    const auto measured = low_rank_->reconstruct(matrices);
    if (options_.batched) return unpack_square(spans, seen);
    seen.measured.push_back(measured);
    rows.write_back();
  }

  // What the next window begins with has to be made orthonormal.
  void add_bases(std::vector<Basis>& bases) const {
    for (const auto& matrix : matrices_) {
      if (!options_.warm_start) matrix.now.q.zero_();  // so every vector is drawn anew
      bases.push_back({matrix.now.q.t(), matrix.number});
    }
  }

  // Tensors that live as long as this object.
  std::vector<at::Tensor> used_by_the_side_stream() const {
    std::vector<at::Tensor> tensors{result_};
    for (const auto& own : matrices_) {
      tensors.insert(tensors.end(), {own.p, own.now.q, own.now.error, own.kept.error, own.kept.q, own.error_before});
    }
    return tensors;
  }

  // ---------------------------------------------------------------------- note [What is remembered for good], codec.h

  void step_begins() {
    has_kept_q_ = false;
    for (auto& matrix : matrices_) matrix.has_kept_error = false;
  }

  // The window is about to write all of Q: note [Errors change places], kept.h.
  void keep_q() {
    if (std::exchange(has_kept_q_, true)) return;
    Keeping keeping(is_captured_);
    for (const auto& matrix : matrices_) keeping.add(matrix.now.q, matrix.kept.q);
    keeping.copy_rest();
  }

  // The results for `which` will be dropped: their errors are what they were before this window.
  void discard(const Spans& spans, Numbers which) {
    for (const auto number : which) {
      if (place_of_[number] >= matrices_.size()) continue;
      const auto& matrix = matrices_[place_of_[number]];
      if (!matrix.error_before.defined()) continue;
      const auto own = [&](const at::Tensor& error) { return options_.batched ? part_of(error, spans.all[number]) : error; };
      own(matrix.now.error).copy_(own(matrix.error_before));
    }
  }

  void undo(const at::Tensor& only_if) {
    for (const auto& matrix : matrices_) {
      if (has_kept_q_) undo_change(matrix.now.q, matrix.kept.q, only_if, is_captured_);
      if (matrix.has_kept_error) undo_change(matrix.now.error, matrix.kept.error, only_if, is_captured_);
    }
    if (!only_if.defined()) step_begins();
  }

 private:
  void add(const LowRankMemory::Matrix& memory, int64_t rows, size_t span, uint64_t number) {
    const auto& [error, q] = memory;
    const auto p = in_message_ ? at::Tensor() : at::empty({rows, q.size(0)}, q.options());
    const auto kept_error = options_.error_feedback ? at::empty_like(error) : at::Tensor();
    matrices_.push_back({span, number, rows, p, memory, {kept_error, at::empty_like(q)}});
    elements_[0] += rows * q.size(0);
    elements_[1] += q.numel();
  }

  // The places of the factors in a leg's wire, then those of the rest.
  const std::vector<at::Tensor>& places(size_t leg, Wires wires) const {
    auto& places = wires[leg].parts;
    if (!places.empty()) return places;
    const auto& wire = wires[leg].tensor();
    int64_t offset = 0;
    for (const auto& matrix : matrices_) {
      const auto rank = matrix.now.q.size(0), elements = leg == 0 ? matrix.rows * rank : matrix.now.q.numel();
      const auto place = wire.narrow(0, offset, elements);
      places.push_back(leg == 0 ? place.view({matrix.rows, rank}) : place.view_as(matrix.now.q));
      offset += elements;
    }
    for (size_t i = 0; i < rest_.size() && leg == 0; ++i) {
      places.push_back(view_of(wire, rest_[i].like, static_cast<size_t>(offset)));
      offset += rest_[i].length();
    }
    return places;
  }

  at::Tensor rest_of(const at::Tensor& wire) const { return wire.narrow(0, elements_[0] - rest_elements_, rest_elements_); }

  // From the factors to their places.
  std::vector<Slot> factors(size_t leg, Wires wires) const {
    std::vector<Slot> slots;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      slots.push_back({leg == 0 ? matrices_[i].p : matrices_[i].now.q, places(leg, wires)[i]});
    }
    return slots;
  }

  LowRankMatrix matrix(size_t i, const at::Tensor& gradient, Wires wires) const {
    const auto& own = matrices_[i];
    return {gradient, own.now.error, in_message_ ? places(0, wires)[i] : own.p, own.now.q, own.before};
  }

  at::Tensor to_read(Rows& rows, const Spans& spans, size_t i) const {
    return matrices_[i].shaped(rows.of(spans.all[matrices_[i].span], spans.dtype, /*is_read=*/true));
  }

  void compress(const Spans& spans, const std::vector<size_t>& which, Wires wires, double scale) {
    keep_errors(spans, which);
    if (options_.batched) add_gradients(spans);
    Rows rows;
    std::vector<LowRankMatrix> matrices;
    std::vector<Slot> slots;
    for (const auto i : which) {
      matrices.push_back(matrix(i, options_.batched ? at::Tensor() : to_read(rows, spans, i), wires));
      slots.push_back({matrices_[i].p, places(0, wires)[i]});
    }
    low_rank_->compress(matrices, in_message_ ? scale : 1.0);
    if (!in_message_) p_kernels_->pack(slots, scale, spans.call);
  }

  // The window is about to write all errors of `which`.
  void keep_errors(const Spans& spans, const std::vector<size_t>& which) {
    is_captured_ = is_captured_ || is_capturing(spans.device);
    const auto may_be_dropped = [&](const Matrix& matrix) {
      return options_.batched ? std::ranges::any_of(spans.all, &Span::may_be_dropped) : spans.all[matrix.span].may_be_dropped;
    };
    Keeping keeping(is_captured_);
    for (const auto i : which) {
      auto& matrix = matrices_[i];
      const auto &error = matrix.now.error, &own = matrix.kept.error;
      matrix.before = error;
      if (!own.defined()) continue;
      if (std::exchange(matrix.has_kept_error, true)) {
        matrix.error_before = may_be_dropped(matrix) ? error.clone() : at::Tensor();
        continue;
      }
      matrix.error_before = own;
      matrix.before = keeping.add(error, own);
    }
    keeping.copy_rest();
  }

  // Makes the bucket one square, padded with zeros.
  void add_gradients(const Spans& spans) {
    auto& square = matrices_.front();
    const auto& error = square.now.error;
    if (!square.before.is_same(error)) error.copy_(square.before);
    if (!options_.error_feedback) error.zero_();
    square.before = error;
    std::vector<at::Tensor> errors, gradients;
    for (const auto& span : spans.all) {
      if (!span.gradient.defined()) continue;
      errors.push_back(part_of(error, span));
      gradients.push_back(span.gradient);
    }
    if (!errors.empty()) at::_foreach_add_(errors, gradients);
  }

  void unpack_square(const Spans& spans, Seen& seen) {
    const auto errors = matrices_.front().now.error.view(-1);
    errors.narrow(0, spans.numbers, errors.numel() - spans.numbers).zero_();  // the padding has no error
    std::vector<Slot> slots;
    for (const auto& span : spans.all) slots.push_back({span.gradient, part_of(result_, span)});
    unpack(slots, result_.narrow(0, 0, spans.numbers), seen);
  }

  // `values`: those of all slots.
  void unpack(const std::vector<Slot>& slots, const at::Tensor& values, Seen& seen) {
    const bool moves_all = std::ranges::all_of(slots, [](const Slot& slot) { return slot.gradient.defined(); });
    const auto measured = gradient_kernels_->unpack(slots, moves_all);
    measured.defined() ? seen.measured.push_back(measured) : seen.unread.push_back(values);
  }

  const LowRankOptions& options_;
  const c10::ScalarType wire_;
  const bool in_message_;              // note [Factors in the message]
  std::vector<Matrix> matrices_;       // batched: one
  std::vector<Span> rest_;             // uncompressed
  std::vector<size_t> place_of_;       // by span, among the places in leg 0's wire
  std::array<int64_t, 2> elements_{};  // of the wire, by leg
  int64_t rest_elements_ = 0;          // the last ones of leg 0
  at::Tensor result_;                  // batched: the new gradients, flat
  std::unique_ptr<LowRankKernels> low_rank_;
  std::unique_ptr<Kernels> p_kernels_, q_kernels_, gradient_kernels_;  // one each, since each remembers one set of addresses
  bool has_kept_q_ = false;
  bool is_captured_ = false;  // a step was captured
};

class LowRank : public Codec {
 public:
  LowRank(LowRankOptions options, LowRankMemory memory)
      : options_(options), memory_(std::move(memory)), window_(options.first_window) {}

  std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t) override {
    buckets_.clear();
    std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, bool>, std::vector<size_t>> alike;
    std::vector<std::vector<Leg>> legs;
    for (auto& spans : buckets) {
      spans.place(1, 1);
      alike[{spans.device.type(), spans.device.index(), spans.dtype == at::kDouble}].push_back(buckets_.size());
      legs.push_back(buckets_.emplace_back(spans, options_, memory_).legs());
    }
    alike_.clear();
    for (auto& [key, all] : alike) alike_.emplace_back(make_low_rank_kernels(buckets[all.front()].device), std::move(all));
    return legs;
  }

  void encode(size_t leg, const Spans& spans, Numbers which, Wires wires, double scale) override {
    auto& bucket = buckets_[spans.bucket];
    leg == 0 ? bucket.make_p(spans, which, wires, scale) : bucket.make_q(spans, wires, scale);
  }

  Seen decode(const Spans& spans, Wires wires, bool) override {
    auto& bucket = buckets_[spans.bucket];
    Seen seen;
    bucket.receive(spans, wires, seen);
    bucket.reconstruct(spans, wires, seen);
    end_window(spans.bucket);
    for (const auto& tensor : bucket.used_by_the_side_stream()) keep_for_current_stream(tensor);
    return seen;
  }

  void discard(const Spans& spans, Numbers which) override { buckets_[spans.bucket].discard(spans, which); }

  void fill_void(size_t leg, size_t bucket, const at::Tensor& place, double value) const override {
    buckets_[bucket].fill_void(leg, place, value);
  }

  void recover(size_t bucket, Wires wires) override {
    buckets_[bucket].keep_q();
    buckets_[bucket].receive_q(wires);
    end_window(bucket);
  }

  void keep() override {
    for (auto& bucket : buckets_) bucket.step_begins();
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& bucket : buckets_) bucket.undo(only_if);
  }

 private:
  // Makes all buckets' Q ready for the next window, since a call is three launches however many bases it has. The seed is the
  // same on all ranks.
  void end_window(size_t bucket) {
    if (bucket + 1 < buckets_.size()) return;
    const auto seed = options_.seed * 1000003 + ++window_;
    for (auto& [kernels, buckets] : alike_) {
      std::vector<Basis> bases;
      for (const auto each : buckets) buckets_[each].add_bases(bases);
      kernels->orthogonalise(bases, options_.epsilon, seed);
    }
  }

  const LowRankOptions options_;
  const LowRankMemory memory_;
  std::vector<LowRankBucket> buckets_;
  std::vector<std::pair<std::unique_ptr<LowRankKernels>, std::vector<size_t>>> alike_;  // buckets of a device and dtype
  uint64_t window_;  // counts ended windows; a window counts when its last bucket has ended
};

}  // namespace

std::shared_ptr<Codec> make_low_rank(LowRankOptions options, LowRankMemory memory) {
  return std::make_shared<LowRank>(options, std::move(memory));
}

}  // namespace fastddp
