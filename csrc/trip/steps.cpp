#include "trip/steps.h"

#include <array>
#include <numeric>
#include <utility>

#include "bucket/bucket_range.h"
#include "bucket/measuring.h"
#include "bucket/packing.h"
#include "trip/way.h"

namespace fastddp {
namespace {

// encode() of the first leg: of these members, whose gradients have come.
void encode_members(const Way& way, Travel& travel, Numbers members) {
  auto& bucket = *travel.bucket;
  auto& spans = travel.spans;
  std::vector<size_t> not_read;
  for (const auto member : members) {
    auto& span = spans.all[member];
    if (!span.packs) not_read.push_back(member);
    span.gradient = bucket.gradient(member);
    span.may_be_dropped = bucket.window[member].may_be_dropped;
    bucket.window[member].packed = true;
    keep_for_current_stream(span.gradient);
  }
  measure_local(bucket, not_read);
  spans.sums = bucket.local_sums ? &*bucket.local_sums : nullptr;
  for (const auto member : members) bucket.window[member].measured = true;
  spans.call = bucket.window.packs++;
  way.codec->encode(0, spans, members, travel.wires, travel.codec_scale);
}

at::Tensor encode_all(const Way& way, Travel& travel, size_t leg) {
  const BucketRange range(leg == 0 ? "pack" : "project", *travel.bucket, leg);
  way.codec->encode(leg, travel.spans, travel.all, travel.wires, travel.codec_scale);
  return travel.wires[leg].tensor();
}

// Two levels: the spans' gradients are parts of this rank's run of the bucket's wire. They are the same tensors in every window while
// the wire is the same.
void bind_run(const Way& way, Travel& travel, const at::Tensor& wire) {
  auto& bucket = *travel.bucket;
  auto span = travel.spans.all.begin();  // in the order of members, of which some have one
  for (size_t member = 0; member < bucket.size() && span != travel.spans.all.end(); ++member) {
    // All ranks of the node drop the same placeholders.
    if (bucket.layout.parameter(member) == span->parameter) (span++)->may_be_dropped = bucket.window[member].may_be_dropped;
  }
  if (travel.bound.is_same(wire)) return;
  const auto& places = way.sharding->spans(bucket.index());
  for (auto& span : travel.spans.all) {
    span.gradient = view_of(wire, span.like, static_cast<size_t>(places[span.number].offset));
    bucket.wire.lend(span.gradient);
  }
  travel.bound = wire;
  if (!travel.legs.empty()) return;  // the codec's wire travels
  travel.run = wire.narrow(0, travel.extent.first, travel.extent.second);
  bucket.wire.lend(travel.run);
}

}  // namespace

std::vector<size_t> first_numbers(size_t count) {
  std::vector<size_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// ------------------------------------------------------------------------------------------------------- from gradients to a wire

at::Tensor pack_own(const Way&, Travel& travel) {
  return pack(*travel.bucket, not_packed(*travel.bucket), travel.scale);
}

void pack_own_on_arrival(const Way&, Travel& travel, size_t member) {
  pack_on_arrival(*travel.bucket, member, travel.scale);
}

at::Tensor encode(const Way& way, Travel& travel) {
  auto& bucket = *travel.bucket;
  const auto left = not_packed(bucket);
  if (travel.legs.empty()) return pack(bucket, left, travel.scale);
  const BucketRange range("pack", bucket);
  bucket.window.producers.current_stream_waits(bucket.device());
  if (!left.empty()) encode_members(way, travel, left);
  return travel.wires.front().tensor();
}

void encode_on_arrival(const Way& way, Travel& travel, size_t member) {
  auto& bucket = *travel.bucket;
  if (travel.legs.empty()) return pack_on_arrival(bucket, member, travel.scale);
  if (travel.encodes_on_arrival) encode_members(way, travel, std::array{member});
}

at::Tensor measure_all(const Way&, Travel& travel) {
  auto& bucket = *travel.bucket;
  bucket.window.producers.current_stream_waits(bucket.device());
  measure_local(bucket, first_numbers(bucket.size()));
  return {};
}

void measure_on_arrival(const Way&, Travel& travel, size_t member) {
  if (travel.bucket->kernels->pack_on_arrival()) measure_local(*travel.bucket, std::array{member});
}

// ------------------------------------------------------------------------------------------------------ from one wire to the next

at::Tensor encode_again(const Way& way, Travel& travel) {
  return encode_all(way, travel, 1);
}

at::Tensor encode_run(const Way& way, Travel& travel) {
  bind_run(way, travel, travel.at(0).travels);
  return travel.legs.empty() ? travel.run : encode_all(way, travel, 0);
}

at::Tensor decode_run(const Way& way, Travel& travel) {
  travel.is_decoded = true;
  if (travel.legs.empty()) return travel.bound;
  const BucketRange range("unpack", *travel.bucket, travel.legs.size() - 1);
  way.codec->decode(travel.spans, travel.wires, /*are_parts=*/false);
  return travel.bound;
}

// -------------------------------------------------------------------------------------------------------------- back to gradients

void decode(const Way& way, Travel& travel) {
  auto& bucket = *travel.bucket;
  if (travel.legs.empty()) return unpack(bucket, bucket.wire.tensor());
  const BucketRange range("unpack", bucket, travel.legs.size() - 1);
  for (auto& span : travel.spans.all) {
    span.gradient = bucket.gradient_to_write(span.number);
    bucket.window.kept.add(span.gradient);
  }
  bucket.window.seen = way.codec->decode(travel.spans, travel.wires, /*are_parts=*/false);
}

void unpack_own(const Way&, Travel& travel) {
  travel.is_decoded = false;
  unpack(*travel.bucket, travel.bucket->wire.tensor());
}

void decode_mine(const Way& way, Travel& travel) {
  auto& bucket = *travel.bucket;
  if (travel.legs.empty()) return bucket.shard->take(bucket, travel.at(0).travels);
  const BucketRange range("unpack", bucket, travel.legs.size() - 1);
  bucket.window.seen = way.codec->decode(bucket.shard->mine_to_write(), travel.wires, /*are_parts=*/true);
  bucket.shard->finish(bucket);
}

void decode_run_of_mine(const Way& way, Travel& travel) {
  const auto wire = decode_run(way, travel);
  travel.bucket->shard->take(*travel.bucket, wire);
  travel.is_decoded = false;
}

void unpack_result(const Way&, Travel& travel) {
  unpack(*travel.bucket, std::exchange(travel.at(0).pieces.front().sum, {}));
}

void leave(const Way&, Travel&) {}

// --------------------------------------------------------------------------------------------------------- in a window that fails

at::Tensor void_own(const Way&, Travel& travel, double value) {
  const auto wire = travel.bucket->wire.another();
  travel.bucket->layout.fill(wire, value);
  return wire;
}

at::Tensor void_to_node(const Way& way, Travel& travel, double value) {
  return void_own(way, travel, way.codec->remembers ? 0.0 : value);
}

at::Tensor void_run(const Way& way, Travel& travel, double value) {
  return void_own(way, travel, value).narrow(0, travel.extent.first, travel.extent.second);
}

at::Tensor void_hook(const Way& way, Travel& travel, double) {
  way.hook->run_void(*travel.bucket);
  return {};
}

void recover(const Way& way, Travel& travel) {
  if (!travel.legs.empty()) way.codec->recover(travel.bucket->index(), travel.wires);
}

void recover_run(const Way& way, Travel& travel) {
  if (!std::exchange(travel.is_decoded, false)) recover(way, travel);
  if (travel.bound.is_same(travel.bucket->wire.tensor())) return;
  travel.bound.reset();
  travel.run.reset();
  for (auto& span : travel.spans.all) span.gradient.reset();
}

}  // namespace fastddp
