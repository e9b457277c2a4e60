#include "bucket/packing.h"

#include "bucket/bucket_range.h"
#include "bucket/measuring.h"
#include "bucket/placing.h"

namespace fastddp {
namespace {

// Note [Where gradients live]
void place_gradient(Bucket& bucket, size_t member, bool lived_in_wire) {
  auto& state = bucket.window[member];
  auto& gradient = bucket.gradient(member);
  const auto& view = bucket.wire.parts[member];
  const bool has_placeholder = state.has_placeholder();
  state.packed = state.in_wire = true;
  if (bucket.layout.form().as_bucket_view && !has_placeholder) {
    gradient = view;
  } else if (!gradient.defined() || has_placeholder || (state.exclusive && fits(gradient, view))) {
    gradient = as_gradient(view);
  } else {
    state.in_wire = lived_in_wire;
  }
}

// After wait_for_gradients().
void pack_members(Bucket& bucket, const std::vector<size_t>& members, double scale) {
  auto& window = bucket.window;
  window.beside = 0;
  if (!bucket.wire.exists()) bucket.make_wire();
  if (window.none_is_packed()) leave_wire_to_holders(bucket);
  std::vector<Slot> slots;
  slots.reserve(members.size());
  std::vector<size_t> left_alone;
  for (const auto member : members) {
    const auto gradient = bucket.gradient(member);
    const auto& view = bucket.wire.parts[member];
    const bool lived_in_wire = lives_in(view, gradient);
    if (!lived_in_wire || scale != 1.0) {
      slots.push_back({gradient, view, member});
    } else {
      left_alone.push_back(member);
    }
    if (!lived_in_wire) keep_for_current_stream(gradient);
    place_gradient(bucket, member, lived_in_wire);
  }
  if (!slots.empty())
    bucket.kernels->pack(slots, scale, window.packs++, bucket.local_sums ? sums_of_packed(bucket, slots) : nullptr);
  if (!left_alone.empty()) measure_local(bucket, left_alone);
}

}  // namespace

void wait_for_gradients(const Bucket& bucket) {
  bucket.window.producers.current_stream_waits(bucket.device());
}

const at::Tensor& pack(Bucket& bucket, double scale) {
  const auto members = bucket.window.unpacked();
  // Members that are packed already were packed on the gradients' streams.
  wait_for_gradients(bucket);
  if (members.empty()) return bucket.wire.tensor();
  const BucketRange range("pack", bucket);
  pack_members(bucket, members, scale);
  return bucket.wire.tensor();
}

void pack_on_arrival(Bucket& bucket, size_t member, double scale) {
  std::vector<size_t> members{member};
  if (!bucket.kernels->pack_on_arrival() && !bucket.window.left_in_place) {
    if (!bucket.layout.form().as_bucket_view || bucket.window.beside < kPartBytes) return;
    members = bucket.window.unpacked(&MemberState::final);
  }
  const BucketRange range("pack", bucket);
  wait_for_gradients(bucket);
  pack_members(bucket, members, scale);
}

void unpack(Bucket& bucket, const at::Tensor& result) {
  const bool is_wire = result.is_same(bucket.wire.tensor());
  std::vector<Slot> slots;
  slots.reserve(bucket.size());
  for (size_t member = 0; member < bucket.size(); ++member) {
    if (is_wire && bucket.window[member].in_wire) continue;
    const auto view = is_wire ? bucket.wire.parts[member] : bucket.layout.view(result, member);
    slots.push_back({bucket.gradient_to_write(member), view});
  }
  if (slots.empty()) return;
  const BucketRange range("unpack", bucket);
  for (const auto& slot : slots) bucket.window.kept.add(slot.gradient);
  const auto found = bucket.kernels->unpack(slots, slots.size() == bucket.size());
  if (found.defined()) bucket.window.seen = {{found}, {}};
}

void note_use_of_wire(Bucket& bucket, const at::Tensor& wire) {
  if (bucket.lends_wire()) {
    bucket.window.kept.add(wire);
  } else {
    keep_for_current_stream(wire);
  }
}

}  // namespace fastddp
