#include "bucket/own_shard.h"

#include <algorithm>
#include <utility>

#include "bucket/bucket_range.h"

namespace fastddp {

OwnShard::OwnShard(const Sharding& sharding, size_t bucket, std::vector<at::Tensor> holders, std::vector<at::Tensor> notices)
    : spans(sharding.make_bucket(bucket, std::move(holders))),
      run_(sharding.run(bucket)),
      offsets_(sharding.offsets(bucket)),
      notices_(std::move(notices)),
      span_of_(notices_.size()),
      taken_back_(notices_.size()),
      kept_(spans.size()) {
  const auto& parameters = sharding.parameters(bucket);
  for (size_t span = 0; span < spans.size(); ++span) {
    if (spans.layout.length(span) == 0) continue;
    const auto found = std::ranges::find(parameters, spans.layout.parameter(span));
    span_of_[static_cast<size_t>(found - parameters.begin())] = span;
  }
}

bool OwnShard::take_back(size_t member, at::Tensor& gradient) {
  if (!gradient.defined() || !is_notice(member, gradient)) return false;
  gradient.reset();
  taken_back_[member] = true;
  const auto span = span_of_[member];
  if (span && spans.held(*span).defined()) kept_[*span] = spans.held(*span).clone();
  return true;
}

// It was made on the stream of a gradient.
at::Tensor OwnShard::take_kept(size_t span) {
  auto kept = std::exchange(kept_[span], {});
  keep_for_current_stream(kept);
  return kept;
}

void OwnShard::take(Bucket& bucket, const at::Tensor& wire) {
  spans.window.reset();
  if (wire.scalar_type() == spans.layout.gradient_dtype() && !bucket.lends_wire()) return bind(bucket, wire);
  std::vector<Slot> slots;
  for (size_t span = 0; span < spans.size(); ++span) {
    const auto part = view_of(wire, spans.layout[span].like, static_cast<size_t>(place(span)));
    slots.push_back({spans.gradient_to_write(span), part});
  }
  const BucketRange range("unpack", bucket);
  const auto found = spans.kernels->unpack(slots, /*measuring=*/true);
  if (found.defined()) spans.window.measured = {found};
}

// They are the same tensors in every window while the wire is the same.
void OwnShard::bind(Bucket& bucket, const at::Tensor& wire) {
  const bool is_bound = bound_.defined() && bound_.is_same(wire);
  for (size_t span = 0; span < spans.size(); ++span) {
    auto& gradient = spans.held(span);
    const auto part = view_of(wire, spans.layout[span].like, static_cast<size_t>(place(span)));
    if (is_bound && lives_in(part, gradient)) continue;
    gradient = as_gradient(part);
    bucket.wire.lend(gradient);
  }
  bound_ = wire;
}

void OwnShard::finish(size_t member, at::Tensor& gradient) {
  gradient = notices_[member];
  taken_back_[member] = false;
  const auto span = span_of_[member];
  if (!span) return;
  bump_version(spans.held(*span));
  const auto kept = take_kept(*span);
  if (!kept.defined()) return;
  spans.note_rewritten();
  spans.held(*span).add_(kept);
}

void OwnShard::restore(size_t member, at::Tensor& gradient) {
  spans.note_rewritten();
  if (!taken_back_[member]) return;
  gradient = notices_[member];
  taken_back_[member] = false;
  const auto span = span_of_[member];
  if (!span) return;
  if (const auto kept = take_kept(*span); kept.defined()) about_to_write(spans.held(*span)).copy_(kept);
}

void OwnShard::add(const Bucket& bucket, size_t member, const at::Tensor& whole) {
  const auto span = span_of_[member];
  if (!span) return;
  spans.note_rewritten();
  const auto begin = static_cast<size_t>(place(*span) - bucket.layout.offset(member));
  about_to_write(spans.held(*span)).add_(view_of(whole, spans.layout[*span].like, begin));
}

void OwnShard::forget(size_t member, bool is_zero) {
  taken_back_[member] = is_zero;
  const auto span = span_of_[member];
  if (!span || !kept_[*span].defined()) return;
  is_zero ? void(kept_[*span].zero_()) : kept_[*span].reset();
}

void OwnShard::zero() {
  for (size_t member = 0; member < notices_.size(); ++member) forget(member);
  for (size_t span = 0; span < spans.size(); ++span) {
    if (spans.held(span).defined()) about_to_write(spans.held(span)).zero_();
  }
}

}  // namespace fastddp
