// Block8: gradients as numbers of 8 bits, which ranks add up in fp32.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "bucket/bucket_range.h"
#include "bucket/gradient_memory.h"
#include "bucket/own_shard.h"
#include "codec/codec.h"
#include "codec/flat_gradients.h"
#include "codec/kept.h"

namespace fastddp {
namespace {

// A bucket's blocks, errors and wires.
struct Coded {
  std::vector<size_t> parameters;     // by member
  std::vector<int64_t> first_blocks;  // by member
  int64_t blocks = 0;
  int64_t block = 0;  // elements
  at::Tensor error;   // undefined: no error feedback
  at::Tensor before;  // the error when the step began, if it has changed: note [Errors change places], kept.h
  bool has_changed = false;
  at::Tensor wire, sum;
  std::unique_ptr<Block8Kernels> kernels;
  // This window's.
  FlatGradients flat;
  std::vector<BlockedGradient> gradients;  // by member; undefined: not encoded yet
  // By member: when this step first changed the error. Where it has not, but the bucket's has: it is in `before`.
  enum class Changed : uint8_t { no, in_this_window, before };
  std::vector<Changed> changed;
  std::vector<at::Tensor> errors_before;  // by member: the error before this window, if discard() may need it

  at::Tensor error_of(size_t member) const { return own_blocks(error, member); }
  at::Tensor before_of(size_t member) const { return own_blocks(before, member); }

  at::Tensor own_blocks(const at::Tensor& errors, size_t member) const {
    const auto begin = first_blocks[member];
    const auto end = member + 1 < first_blocks.size() ? first_blocks[member + 1] : blocks;
    return errors.narrow(0, begin * block, (end - begin) * block);
  }

  void let_gradients_go() {
    flat.let_go();
    std::ranges::fill(gradients, BlockedGradient{});
  }
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
// places when the step first changes one of its errors. A member that is not encoded then (torch's Join, or a window that fails)
// gets its errors by copy_rest().
class Block8Codec : public Codec, private Adder {
 public:
  Block8Codec(Block8Options options, std::shared_ptr<Block8Errors> errors)
      : options_(options), format_(options.format), errors_(std::move(errors)), window_(options.first_window) {}

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>& units) override {
    coded_ = std::vector<Coded>(buckets.size());
    for (auto* bucket : buckets) {
      bucket->set_wire_format({bucket->layout.gradient_dtype(), format_.block, format_.block});
      bucket->wire.disable();
      lay_out(*bucket, coded_[bucket->index()], units.front());
    }
  }

  std::optional<Format> format(size_t, const Bucket& bucket) const override {
    return Format{at::kByte, groups_of(coded_[bucket.index()]) * format_.group_bytes()};
  }

  void place(size_t, const Bucket& bucket, const at::Tensor& wire, const at::Tensor& sum) override {
    auto& coded = coded_[bucket.index()];
    coded.wire = wire;
    coded.sum = sum;
  }

  void displace(const Bucket& bucket) override { place(0, bucket, {}, {}); }

  bool keeps_what_it_sent() const override { return true; }

  Adder* adder(size_t) override { return this; }

  void on_gradient(Bucket& bucket, size_t member, double scale) override {
    if (bucket.kernels->pack_on_arrival()) encode_members(bucket, {member}, scale);
  }

  void encode(size_t, Bucket& bucket, double scale) override {
    const BucketRange range("pack", bucket);
    bucket.wait_for_gradients();
    std::vector<size_t> left;
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (!bucket.window[member].packed) left.push_back(member);
    }
    encode_members(bucket, left, scale);
  }

  void decode(Bucket& bucket) override {
    const BucketRange range("unpack", bucket);
    auto& coded = coded_[bucket.index()];
    bucket.window.measured.push_back(coded.kernels->decode(coded.gradients, coded.sum));
    coded.flat.write_back();
    for (size_t member = 0; member < bucket.size(); ++member) bump_version(bucket.gradient(member));
    end_window(bucket, coded);
  }

  void decode_shard(Bucket& bucket, const at::Tensor&) override {
    const BucketRange range("unpack", bucket);
    auto& coded = coded_[bucket.index()];
    auto& spans = bucket.shard->spans;
    spans.reset();
    FlatGradients flat;
    std::vector<BlockedGradient> gradients;
    for (size_t span = 0; span < spans.size(); ++span) {
      if (spans.layout.length(span) == 0) continue;
      gradients.push_back({flat.of(spans, span, at::kFloat), bucket.shard->place(span) / format_.block});
      bump_version(spans.held(span));
    }
    if (!gradients.empty()) spans.window.measured.push_back(coded.kernels->decode(gradients, coded.sum));
    flat.write_back();
    end_window(bucket, coded);
  }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return bucket.measure_gradients(); }

  void discard(Bucket& bucket, size_t member) override {
    auto& coded = coded_[bucket.index()];
    auto before = std::exchange(coded.errors_before[member], {});
    if (!before.defined() && coded.changed[member] == Coded::Changed::in_this_window) before = coded.before_of(member);
    if (!before.defined()) return;
    // Orders no gradients.
    keep_for_current_stream(before);
    coded.error_of(member).copy_(before);
  }

  void fill_void(size_t, const Bucket&, const at::Tensor& place, double value) const override {
    TORCH_CHECK(value == 0.0 || std::isnan(value), "fastddp: void gradients are 0 or NaN, not ", value);
    place.zero_();
    const auto groups = place.view({-1, format_.group_bytes()});
    constexpr auto scales = Block8::kBlocks * static_cast<int64_t>(sizeof(float));
    groups.narrow(1, 0, scales).view(at::kFloat).fill_(value);
  }

  void recover(Bucket& bucket) override {
    copy_rest(coded_[bucket.index()]);
    end_window(bucket);
  }

  void keep() override {
    for (auto& coded : coded_) {
      coded.has_changed = false;
      std::ranges::fill(coded.changed, Coded::Changed::no);
    }
    if (errors_ != nullptr) errors_->kept.clear();
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& coded : coded_) undo(coded, only_if);
    if (!only_if.defined()) keep();
  }

 private:
  // ------------------------------------------------------------------------------------------------- preparation

  void lay_out(const Bucket& bucket, Coded& coded, int64_t unit) const {
    for (size_t member = 0; member < bucket.size(); ++member) {
      coded.first_blocks.push_back(bucket.layout.offset(member) / format_.block);
    }
    coded.parameters = bucket.layout.parameters();
    coded.blocks = bucket.layout.wire_length() / format_.block;
    coded.block = format_.block;
    coded.gradients.resize(bucket.size());
    coded.changed.resize(bucket.size());
    coded.errors_before.resize(bucket.size());
    coded.kernels = make_block8_kernels(format_, bucket.device());
    if (errors_ != nullptr) make_error(bucket, coded, unit);
  }

  void make_error(const Bucket& bucket, Coded& coded, int64_t unit) const {
    const auto groups_in_a_unit = unit / format_.group_bytes();
    const auto groups = (groups_of(coded) + groups_in_a_unit - 1) / groups_in_a_unit * groups_in_a_unit;
    coded.error = at::zeros({groups * format_.group_elements()}, at::TensorOptions().dtype(at::kFloat).device(bucket.device()));
    coded.before = at::zeros_like(coded.error);
    auto& known = errors_->of_parameters;
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto parameter = bucket.layout.parameter(member);
      if (known.size() <= parameter) known.resize(parameter + 1);
      const auto length = bucket.layout.length(member);
      if (length == 0) continue;
      const auto own = coded.error_of(member).narrow(0, 0, length);
      if (known[parameter].defined()) own.copy_(known[parameter]);
      known[parameter] = own;
    }
    take_kept(coded);
  }

  // The buckets are new, but the step began with the old ones.
  void take_kept(Coded& coded) const {
    auto& kept = errors_->kept;
    const auto is_kept = [&](size_t parameter) { return parameter < kept.size() && kept[parameter].defined(); };
    if (std::ranges::none_of(coded.parameters, is_kept)) return;
    coded.has_changed = true;
    coded.before.copy_(coded.error);
    kept.resize(errors_->of_parameters.size());
    for (size_t member = 0; member < coded.parameters.size(); ++member) {
      auto& own = kept[coded.parameters[member]];
      const auto before = coded.before_of(member);
      const auto length = own.defined() ? std::min(own.numel(), before.numel()) : 0;
      if (length > 0) before.narrow(0, 0, length).copy_(own.narrow(0, 0, length));
      own = before;
      coded.changed[member] = Coded::Changed::before;
    }
  }

  int64_t groups_of(const Coded& coded) const { return (coded.blocks + Block8::kBlocks - 1) / Block8::kBlocks; }

  // --------------------------------------------------------------------------------------------------------- the adder

  int64_t unit() const override { return format_.group_bytes(); }

  void add(size_t number, int64_t first, const std::vector<at::Tensor>& shards, const at::Tensor& target) override {
    auto& coded = coded_[number];
    keep_errors(coded);
    copy_rest(coded);
    const auto group = first / format_.group_bytes(), groups = target.numel() / format_.group_bytes();
    const auto element = group * format_.group_elements();
    const auto error = coded.error.defined() ? coded.error.narrow(0, element, groups * format_.group_elements()) : at::Tensor();
    coded.kernels->add(shards, target, error, rounding(number, /*of_sums=*/true), element);
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

  // ------------------------------------------------------------------------------------------------------ the stages

  void encode_members(Bucket& bucket, const std::vector<size_t>& members, double scale) {
    auto& coded = coded_[bucket.index()];
    bucket.measure_local(members);
    keep_errors(coded);
    std::vector<BlockedGradient> first, later;  // the step's first encode of the member, or a later one
    for (const auto member : members) {
      coded.gradients[member] = {coded.flat.of(bucket, member, travels_from(bucket)), coded.first_blocks[member]};
      bucket.window[member].packed = true;
      const bool is_first = coded.error.defined() && coded.changed[member] == Coded::Changed::no;
      (is_first ? first : later).push_back(coded.gradients[member]);
      note_change(coded, member, bucket.window[member].may_be_dropped);
    }
    const auto encode = [&](const auto& gradients, const at::Tensor& before) {
      if (gradients.empty()) return;
      const auto drawn = rounding(bucket.index(), /*of_sums=*/false);
      coded.kernels->encode(gradients, before, coded.error, coded.wire, scale, drawn);
    };
    encode(first, coded.before);
    encode(later, coded.error);
  }

  void note_change(Coded& coded, size_t member, bool may_be_dropped) const {
    if (!coded.error.defined()) return;
    auto& changed = coded.changed[member];
    const bool is_first = changed == Coded::Changed::no;
    changed = is_first ? Coded::Changed::in_this_window : Coded::Changed::before;
    const auto parameter = coded.parameters[member];
    if (errors_->kept.size() <= parameter) errors_->kept.resize(parameter + 1);
    if (is_first) errors_->kept[parameter] = coded.before_of(member);
    const bool is_copied = may_be_dropped && changed == Coded::Changed::before;
    coded.errors_before[member] = is_copied ? coded.error_of(member).clone() : at::Tensor();
  }

  // The bucket's errors are about to change: note [Errors change places], kept.h.
  void keep_errors(Coded& coded) {
    if (!coded.error.defined() || std::exchange(coded.has_changed, true)) return;
    is_captured_ = is_captured_ || is_capturing(coded.error.device());
    if (is_captured_ || !change_places(coded.error, coded.before)) coded.before.copy_(coded.error);
  }

  // Of members that were not encoded in this step.
  void copy_rest(Coded& coded) const {
    if (!coded.has_changed) return;
    for (size_t member = 0; member < coded.changed.size(); ++member) {
      if (coded.changed[member] != Coded::Changed::no) continue;
      coded.error_of(member).copy_(coded.before_of(member));
      note_change(coded, member, /*may_be_dropped=*/false);
    }
  }

  // This window's gradients and their copies.
  std::vector<at::Tensor> used_by_the_side_stream(const Bucket& bucket) const {
    auto tensors = coded_[bucket.index()].flat.copies();
    for (size_t member = 0; member < bucket.size(); ++member) tensors.push_back(bucket.gradient(member));
    return tensors;
  }

  // The dtype that the kernels read. fp16 and bf16 stay as they are, everything else is read as fp32.
  static c10::ScalarType travels_from(const Bucket& bucket) {
    const auto dtype = bucket.layout.gradient_dtype();
    return dtype == at::kHalf || dtype == at::kBFloat16 ? dtype : at::kFloat;
  }

  // The gradients are written.
  void end_window(Bucket& bucket, Coded& coded) {
    for (const auto& tensor : used_by_the_side_stream(bucket)) bucket.window.kept.add(tensor);
    // add() has changed these tensors on the side stream.
    if (coded.error.defined()) keep_for_current_stream(coded.error);
    if (coded.before.defined()) keep_for_current_stream(coded.before);
    coded.let_gradients_go();
    end_window(bucket);
  }

  void end_window(const Bucket& bucket) {
    if (bucket.index() + 1 == coded_.size()) ++window_;
  }

  void undo(Coded& coded, const at::Tensor& only_if) const {
    for (const auto& [gradient, first_block] : coded.gradients) {
      // Of a window that failed.
      if (gradient.defined()) keep_for_current_stream(gradient);
    }
    coded.let_gradients_go();
    if (coded.has_changed) undo_errors(coded.error, coded.before, only_if, is_captured_);
  }

  const Block8Options options_;
  const Block8 format_;
  const std::shared_ptr<Block8Errors> errors_;
  std::vector<Coded> coded_;  // by bucket
  uint64_t window_;           // the number of this window
  bool is_captured_ = false;  // a step was captured
};

}  // namespace

std::unique_ptr<Codec> make_block8(Block8Options options, std::shared_ptr<Block8Errors> errors) {
  return std::make_unique<Block8Codec>(options, std::move(errors));
}

}  // namespace fastddp
