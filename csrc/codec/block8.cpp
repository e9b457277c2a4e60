// Block8: gradients as numbers of 8 bits, which ranks add up in fp32.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "codec/codec.h"
#include "codec/kept.h"
#include "codec/rows.h"

namespace fastddp {
namespace {

// The errors of a span's blocks.
struct SpanErrors {
  size_t parameter;
  at::Tensor now, before;  // parts of the bucket's
  // When this step first changed them. Where it has not, but the bucket's have changed: they are in `before`.
  enum class Changed : uint8_t { no, in_this_window, earlier } changed = Changed::no;
  at::Tensor before_window = {};  // what they were when this window began, if discard() may need it
};

// Empty: no error feedback.
struct BucketErrors {
  at::Tensor now = {};
  at::Tensor before = {};  // what they were when the step began, if they have changed: note [Errors change places], kept.h
  bool have_changed = false;
  std::vector<SpanErrors> of_spans = {};
};

struct Coded {
  std::unique_ptr<Block8Kernels> kernels;
  BucketErrors errors = {};
};

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Note [Errors of block8]
// Rounding a gradient leaves an error, which is added to the next gradient (error feedback; Seide et al., 2014). Errors are in
// units of the average: gradients times the scale, which may differ between windows. A value is rounded twice: before it
// travels, and after the ranks' values have been added up. The rank that adds knows the second error and adds it to its own. It
// reaches the next window's sum, whichever rank's gradients it came from. So no error is lost.
//
// A step that no optimizer takes is undone (note [What is remembered for good], codec.h). So the bucket's two buffers change
// places when the step first changes one of its errors. A span that is not encoded then (torch's Join, or a window that fails)
// gets its errors by copy_rest().
class Block8Codec : public Codec {
 public:
  Block8Codec(Block8Options options, std::shared_ptr<Block8Errors> errors)
      : options_(options), format_(options.format), errors_(std::move(errors)), window_(options.first_window) {}

  std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t owners) override {
    coded_.clear();
    std::vector<std::vector<Leg>> legs;
    for (auto& spans : buckets) {
      spans.place(format_.block, format_.block);
      const auto groups = (spans.numbers + format_.group_elements() - 1) / format_.group_elements();
      const auto bytes = format_.group_bytes();
      legs.push_back({Leg{.dtype = at::kByte, .elements = groups * bytes, .keeps_sent = true, .adds_unit = bytes}});
      auto& coded = coded_.emplace_back(Coded{make_block8_kernels(format_, spans.device)});
      if (errors_ != nullptr) coded.errors = make_errors(spans, (groups + owners - 1) / owners * owners);
    }
    return legs;
  }

  void encode(size_t, const Spans& spans, Numbers which, Wires wires, double scale) override {
    auto& [kernels, errors] = coded_[spans.bucket];
    begin_change(errors);
    Rows rows;
    std::vector<BlockedGradient> first, later;  // the step's first encode of the span, or a later one
    for (const auto number : which) {
      const auto& span = spans.all[number];
      const bool is_first = errors_ != nullptr && note_change(errors.of_spans[number], span.may_be_dropped);
      (is_first ? first : later).push_back({rows.of(span, dtype_read(spans), /*is_read=*/true), span.offset / format_.block});
    }
    const auto& wire = wires[0].tensor();
    const auto drawn = rounding(spans.bucket, /*of_sums=*/false);
    if (!first.empty()) kernels->encode(first, errors.before, errors.now, wire, scale, drawn);
    if (!later.empty()) kernels->encode(later, errors.now, errors.now, wire, scale, drawn);
  }

  Seen decode(const Spans& spans, Wires wires, bool are_parts) override {
    const auto& [kernels, errors] = coded_[spans.bucket];
    const auto dtype = are_parts ? at::kFloat : dtype_read(spans);
    Rows rows;
    std::vector<BlockedGradient> gradients;
    for (const auto& span : spans.all) {
      if (span.length() == 0 || !span.gradient.defined()) continue;
      gradients.push_back({rows.of(span, dtype, /*is_read=*/false), span.offset / format_.block});
    }
    Seen seen;
    if (!gradients.empty()) seen.measured.push_back(kernels->decode(gradients, wires[0].sum()));
    rows.write_back();
    // add() has changed these tensors on the side stream.
    keep_for_current_stream(errors.now);
    keep_for_current_stream(errors.before);
    end_window(spans.bucket);
    return seen;
  }

  void add(size_t bucket, int64_t first, const std::vector<at::Tensor>& shards, const at::Tensor& target) override {
    auto& [kernels, errors] = coded_[bucket];
    {
      // A rank without inputs has not encoded, so this may be the step's first change.
      const std::lock_guard lock(changing_);
      begin_change(errors);
      copy_rest(errors);
    }
    const auto numbers_of = [&](int64_t bytes) { return bytes / format_.group_bytes() * format_.group_elements(); };
    const auto begin = numbers_of(first);
    const auto error = errors_ != nullptr ? errors.now.narrow(0, begin, numbers_of(target.numel())) : at::Tensor();
    kernels->add(shards, target, error, rounding(bucket, /*of_sums=*/true), begin);
  }

  void discard(const Spans& spans, Numbers which) override {
    if (errors_ == nullptr) return;
    for (const auto number : which) {
      auto& span = coded_[spans.bucket].errors.of_spans[number];
      auto before = std::exchange(span.before_window, {});
      if (!before.defined() && span.changed == SpanErrors::Changed::in_this_window) before = span.before;
      if (!before.defined()) continue;
      // Orders no gradients.
      keep_for_current_stream(before);
      span.now.copy_(before);
    }
  }

  void fill_void(size_t, size_t, const at::Tensor& place, double value) const override {
    TORCH_CHECK(value == 0.0 || std::isnan(value), "fastddp: void gradients are 0 or NaN, not ", value);
    place.zero_();
    const auto groups = place.view({-1, format_.group_bytes()});
    constexpr auto scales = Block8::kBlocks * static_cast<int64_t>(sizeof(float));
    groups.narrow(1, 0, scales).view(at::kFloat).fill_(value);
  }

  void recover(size_t bucket, Wires) override {
    copy_rest(coded_[bucket].errors);
    end_window(bucket);
  }

  void keep() override {
    for (auto& [kernels, errors] : coded_) {
      errors.have_changed = false;
      for (auto& span : errors.of_spans) span.changed = SpanErrors::Changed::no;
    }
    if (errors_ != nullptr) errors_->kept.clear();
  }

  void undo(const at::Tensor& only_if) override {
    for (const auto& [kernels, errors] : coded_) {
      if (errors.have_changed) undo_change(errors.now, errors.before, only_if, is_captured_);
    }
    if (!only_if.defined()) keep();
  }

 private:
  // The dtype that the kernels read. fp16 and bf16 stay as they are, everything else is read as fp32.
  static c10::ScalarType dtype_read(const Spans& spans) {
    return spans.dtype == at::kHalf || spans.dtype == at::kBFloat16 ? spans.dtype : at::kFloat;
  }

  // A rerun draws the same numbers. Each window, rank, bucket, and each of the two roundings draws its own.
  Rounding rounding(size_t bucket, bool of_sums) const {
    if (!options_.seed) return std::nullopt;
    auto key = mixed(*options_.seed + 0x9e3779b97f4a7c15u);
    for (const uint64_t part : {window_, options_.rank, static_cast<uint64_t>(bucket), uint64_t{of_sums}}) {
      key = mixed(key + part + 0x9e3779b97f4a7c15u);
    }
    return Dice{key};
  }

  void end_window(size_t bucket) {
    if (bucket + 1 == coded_.size()) ++window_;
  }

  // ------------------------------------------------------------------------------------------------------------- errors

  BucketErrors make_errors(const Spans& spans, int64_t groups) const {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(spans.device);
    BucketErrors errors{at::zeros({groups * format_.group_elements()}, options)};
    errors.before = at::zeros_like(errors.now);
    for (const auto& span : spans.all) {
      const auto end = span.number + 1 < spans.all.size() ? spans.all[span.number + 1].offset : spans.numbers;
      const auto own = [&](const at::Tensor& all) { return all.narrow(0, span.offset, end - span.offset); };
      errors.of_spans.push_back({span.parameter, own(errors.now), own(errors.before)});
      auto& all = errors_->of_parameters;
      if (all.size() <= span.parameter) all.resize(span.parameter + 1);
      auto& known = all[span.parameter];
      if (span.length() == 0) continue;
      const auto now = errors.of_spans.back().now.narrow(0, 0, span.length());
      if (known.defined()) now.copy_(known);
      known = now;
    }
    take_kept(errors);
    return errors;
  }

  // The buckets are new, but the step began with the old ones.
  void take_kept(BucketErrors& errors) const {
    auto& kept = errors_->kept;
    if (std::ranges::none_of(errors.of_spans, [&](const auto& span) { return kept.contains(span.parameter); })) return;
    errors.have_changed = true;
    errors.before.copy_(errors.now);
    for (auto& span : errors.of_spans) {
      const auto old = std::exchange(kept[span.parameter], span.before);
      const auto length = old.defined() ? std::min(old.numel(), span.before.numel()) : 0;
      if (length > 0) span.before.narrow(0, 0, length).copy_(old.narrow(0, 0, length));
      span.changed = SpanErrors::Changed::earlier;
    }
  }

  // The bucket's errors are about to change: note [Errors change places], kept.h.
  void begin_change(BucketErrors& errors) {
    if (errors_ == nullptr || std::exchange(errors.have_changed, true)) return;
    is_captured_ = is_captured_ || is_capturing(errors.now.device());
    Keeping keeping(is_captured_);
    keeping.add(errors.now, errors.before);
    keeping.copy_rest();
  }

  // The span's errors are about to change. Returns whether this is the step's first change.
  bool note_change(SpanErrors& span, bool may_be_dropped) const {
    const bool is_first = span.changed == SpanErrors::Changed::no;
    span.changed = is_first ? SpanErrors::Changed::in_this_window : SpanErrors::Changed::earlier;
    if (is_first) errors_->kept[span.parameter] = span.before;
    span.before_window = may_be_dropped && !is_first ? span.now.clone() : at::Tensor();
    return is_first;
  }

  // Of spans that were not encoded in this step.
  void copy_rest(BucketErrors& errors) const {
    if (!errors.have_changed) return;
    for (auto& span : errors.of_spans) {
      if (span.changed != SpanErrors::Changed::no) continue;
      span.now.copy_(span.before);
      note_change(span, /*may_be_dropped=*/false);
    }
  }

  const Block8Options options_;
  const Block8 format_;
  const std::shared_ptr<Block8Errors> errors_;
  std::mutex changing_;
  std::vector<Coded> coded_;  // by bucket
  uint64_t window_;           // the number of this window
  bool is_captured_ = false;  // a step was captured
};

}  // namespace

std::shared_ptr<Codec> make_block8(Block8Options options, std::shared_ptr<Block8Errors> errors) {
  return std::make_shared<Block8Codec>(options, std::move(errors));
}

}  // namespace fastddp
