#include "bucket/shard.h"

#include <algorithm>
#include <utility>

#include "bucket/bucket_range.h"

namespace fastddp {
namespace {

// A span is written as its holder's gradient, which has the holder's shape.
Spans spans_with(const std::vector<at::Tensor>& holders, const Sharding& sharding, size_t bucket) {
  const auto dtype = c10::toRealValueType(holders.front().scalar_type());
  Spans mine{.bucket = bucket, .dtype = dtype, .device = holders.front().device()};
  for (auto span : sharding.spans(bucket)) {
    span.like = holders[span.number];
    mine.all.push_back(std::move(span));
  }
  return mine;
}

}  // namespace

Shard::Shard(const Sharding& sharding, size_t bucket, std::vector<at::Tensor> holders, std::vector<at::Tensor> notices)
    : mine_(spans_with(holders, sharding, bucket)),
      holders_(std::move(holders)),
      notices_(std::move(notices)),
      span_of_(notices_.size()),
      taken_back_(notices_.size()),
      kept_(holders_.size()),
      kernels_(make_kernels(mine_.device)) {
  const auto& parameters = sharding.parameters(bucket);
  for (const auto& span : mine_.all) {
    if (span.length() == 0) continue;
    const auto found = std::ranges::find(parameters, span.parameter);
    span_of_[static_cast<size_t>(found - parameters.begin())] = span.number;
  }
}

const Spans& Shard::mine_to_write() {
  for (auto& span : mine_.all) {
    auto& gradient = held(span.number);
    if (!gradient.defined()) gradient = empty_gradient(span.like, span.like.scalar_type());
    bump_version(gradient);
    span.gradient = gradient;
  }
  return mine_;
}

void Shard::take_notice(Bucket& bucket, size_t member) {
  // If there is a placeholder, the notice has been taken away for it.
  if (bucket.shard == nullptr || bucket.window[member].has_placeholder()) return;
  auto& shard = *bucket.shard;
  auto& gradient = bucket.held(member);
  auto& mark = bucket.marks[member];
  if (shard.taken_back_[member] && !mark.still_holds(gradient)) shard.forget(member, /*is_zero=*/gradient.defined());
  if (!gradient.defined() || !shard.is_notice(member, gradient)) return;
  gradient.reset();
  mark.set({});
  shard.taken_back_[member] = true;
  const auto span = shard.span_of_[member];
  if (span && shard.held(*span).defined()) shard.kept_[*span] = shard.held(*span).clone();
}

// It was made on the stream of a gradient.
at::Tensor Shard::take_kept(size_t span) {
  auto kept = std::exchange(kept_[span], {});
  keep_for_current_stream(kept);
  return kept;
}

void Shard::take(Bucket& bucket, const at::Tensor& wire) {
  const auto part = [&](const Span& span) { return view_of(wire, span.like, static_cast<size_t>(span.offset)); };
  if (wire.scalar_type() == mine_.dtype && !bucket.lends_wire()) {
    // They are the same tensors in every window while the wire is the same.
    const bool is_bound = bound_.defined() && bound_.is_same(wire);
    for (const auto& span : mine_.all) {
      auto& gradient = held(span.number);
      const auto own = part(span);
      if (is_bound && lives_in(own, gradient)) continue;
      gradient = as_gradient(own);
      bucket.wire.lend(gradient);
    }
    bound_ = wire;
  } else {
    std::vector<Slot> slots;
    for (const auto& span : mine_to_write().all) slots.push_back({span.gradient, part(span)});
    const BucketRange range("unpack", bucket);
    const auto found = kernels_->unpack(slots, /*measuring=*/true);
    if (found.defined()) bucket.window.seen = {{found}, {}};
  }
  finish(bucket);
}

void Shard::leave_notice(size_t member, at::Tensor& gradient) {
  gradient = notices_[member];
  taken_back_[member] = false;
}

void Shard::finish(Bucket& bucket, size_t member) {
  leave_notice(member, bucket.held(member));
  const auto span = span_of_[member];
  if (!span) return;
  bump_version(held(*span));
  const auto kept = take_kept(*span);
  if (!kept.defined()) return;
  bucket.window.note_rewritten();
  held(*span).add_(kept);
}

void Shard::finish(Bucket& bucket) {
  for (size_t member = 0; member < bucket.size(); ++member) {
    if (!bucket.window[member].has_placeholder()) finish(bucket, member);
  }
}

void Shard::restore(Bucket& bucket, size_t member) {
  bucket.window.note_rewritten();
  if (!taken_back_[member]) return;
  leave_notice(member, bucket.held(member));
  const auto span = span_of_[member];
  if (!span) return;
  if (const auto kept = take_kept(*span); kept.defined()) about_to_write(held(*span)).copy_(kept);
}

void Shard::add(Bucket& bucket, size_t member, const at::Tensor& whole) {
  if (!span_of_[member]) return;
  bucket.window.note_rewritten();
  const auto& span = mine_.all[*span_of_[member]];
  const auto begin = static_cast<size_t>(span.offset - bucket.layout[member].offset);
  about_to_write(held(span.number)).add_(view_of(whole, span.like, begin));
}

void Shard::forget(size_t member, bool is_zero) {
  taken_back_[member] = is_zero;
  const auto span = span_of_[member];
  if (!span || !kept_[*span].defined()) return;
  is_zero ? void(kept_[*span].zero_()) : kept_[*span].reset();
}

void Shard::zero() {
  for (size_t member = 0; member < notices_.size(); ++member) forget(member);
  for (const auto& span : mine_.all) {
    if (held(span.number).defined()) about_to_write(held(span.number)).zero_();
  }
}

}  // namespace fastddp
