#include "trip/steps.h"

#include <numeric>

#include "bucket/bucket_range.h"
#include "bucket/measuring.h"
#include "bucket/packing.h"

namespace fastddp {

std::vector<size_t> first_numbers(size_t count) {
  std::vector<size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

Spans spans_of(const Bucket& bucket) {
  const auto& layout = bucket.layout;
  Spans spans{.bucket = bucket.index(), .dtype = layout.gradient_dtype(), .device = bucket.device(), .grid = layout.grid()};
  for (size_t member = 0; member < bucket.size(); ++member) {
    const auto& like = layout[member].like;
    spans.all.push_back({member, layout.parameter(member), 0, like.numel(), 0, like});
  }
  return spans;
}

std::pair<int64_t, int64_t> extent_of_run(const Travel& travel, const Sharding& sharding, int64_t unit) {
  const auto& spans = sharding.spans(travel.bucket->index());
  const auto length = spans.back().offset + spans.back().length() - spans.front().offset;
  return {spans.front().offset, rounded_up(length, unit)};
}

// ------------------------------------------------------------------------------------------------------ a bucket's gradients

void encode_members(Travel& travel, Codec& codec, Numbers members) {
  auto& bucket = *travel.bucket;
  auto& spans = travel.spans;
  std::vector<size_t> not_packed;
  for (const auto member : members) {
    auto& span = spans.all[member];
    if (!span.packs) not_packed.push_back(member);
    span.gradient = bucket.gradient(member);
    span.may_be_dropped = bucket.window[member].may_be_dropped;
    bucket.window[member].packed = true;
    keep_for_current_stream(span.gradient);
  }
  measure_local(bucket, not_packed);
  spans.sums = bucket.local_sums ? &*bucket.local_sums : nullptr;
  for (const auto member : members) bucket.window[member].measured = true;
  spans.call = bucket.window.packs++;
  codec.encode(0, spans, members, travel.wires, travel.scale);
}

at::Tensor encode_rest(Travel& travel, Codec& codec) {
  auto& bucket = *travel.bucket;
  const BucketRange range("pack", bucket);
  wait_for_gradients(bucket);
  if (const auto left = bucket.window.unpacked(); !left.empty()) encode_members(travel, codec, left);
  return travel.wires.front().tensor();
}

at::Tensor encode_all(Travel& travel, Codec& codec, size_t leg, double scale) {
  const BucketRange range(leg == 0 ? "pack" : "project", *travel.bucket, leg);
  codec.encode(leg, travel.spans, travel.all, travel.wires, scale);
  return travel.wires[leg].tensor();
}

void decode(Travel& travel, Codec& codec) {
  auto& bucket = *travel.bucket;
  const BucketRange range("unpack", bucket, travel.legs.size() - 1);
  for (auto& span : travel.spans.all) {
    span.gradient = bucket.gradient_to_write(span.number);
    bucket.window.kept.add(span.gradient);
  }
  bucket.window.seen = codec.decode(travel.spans, travel.wires, /*are_parts=*/false);
}

void decode_mine(Travel& travel, Codec& codec) {
  auto& bucket = *travel.bucket;
  const BucketRange range("unpack", bucket, travel.legs.size() - 1);
  bucket.window.seen = codec.decode(bucket.shard->mine_to_write(), travel.wires, /*are_parts=*/true);
}

// ---------------------------------------------------------------------------------------- note [Two levels of a bucket], trips.h

// They are the same tensors in every window while the wire is the same.
void bind_run(Travel& travel, const Sharding& sharding, int64_t unit, const at::Tensor& wire) {
  auto& bucket = *travel.bucket;
  auto span = travel.spans.all.begin();  // in the order of members, of which some have one
  for (size_t member = 0; member < bucket.size() && span != travel.spans.all.end(); ++member) {
    // All ranks of the node drop the same placeholders.
    if (bucket.layout.parameter(member) == span->parameter) (span++)->may_be_dropped = bucket.window[member].may_be_dropped;
  }
  if (travel.bound.is_same(wire)) return;
  const auto& places = sharding.spans(bucket.index());
  for (auto& span : travel.spans.all) {
    span.gradient = view_of(wire, span.like, static_cast<size_t>(places[span.number].offset));
    bucket.wire.lend(span.gradient);
  }
  travel.bound = wire;
  if (!travel.legs.empty()) return;  // the codec's wire travels
  const auto [begin, length] = extent_of_run(travel, sharding, unit);
  travel.run = wire.narrow(0, begin, length);
  bucket.wire.lend(travel.run);
}

void decode_run(Travel& travel, Codec& codec) {
  travel.is_decoded = true;
  if (travel.legs.empty()) return;
  const BucketRange range("unpack", *travel.bucket, travel.legs.size() - 1);
  codec.decode(travel.spans, travel.wires, /*are_parts=*/false);
}

void recover_run(Travel& travel, Codec& codec) {
  if (!std::exchange(travel.is_decoded, false) && !travel.legs.empty()) codec.recover(travel.bucket->index(), travel.wires);
  if (travel.bound.is_same(travel.bucket->wire.tensor())) return;
  travel.bound.reset();
  travel.run.reset();
  for (auto& span : travel.spans.all) span.gradient.reset();
}

}  // namespace fastddp
