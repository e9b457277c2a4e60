#include "bucket/packing.h"

#include <ATen/ops/alias.h>

#include <utility>

#include "bucket/bucket_range.h"
#include "bucket/measuring.h"
#include "bucket/shard.h"

namespace fastddp {
namespace {

// Whether somebody kept a gradient of an earlier window that lives in the wire. `known` counts the references that are not the
// wire's own: gradients that parameters still have, and placeholders.
bool somebody_holds_wire(const Bucket& bucket) {
  const auto& wire = bucket.wire;
  if (!wire.exists()) return false;
  size_t known = 0;
  for (size_t member = 0; member < bucket.size(); ++member) {
    const auto& gradient = bucket.held(member);
    const auto& placeholder = bucket.window[member].placeholder;
    const bool is_in_wire = wire.has(gradient);
    if (is_in_wire && !lives_in(wire.parts[member], gradient)) return true;  // at another member's place
    known += is_in_wire;
    known += placeholder && wire.has(placeholder->gradient);
  }
  return wire.is_held_beside(known);
}

// The user's own tensor of the wire's memory: its `data` may be set. To autograd it is a view where torch's DDP has views.
at::Tensor gradient_in_wire(const Bucket& bucket, size_t member) {
  const auto& view = bucket.wire.parts[member];
  return bucket.layout.form().as_bucket_view ? at::alias(view) : as_gradient(view);
}

// Note [Where gradients live], bucket.h.
void place_gradient(Bucket& bucket, size_t member, bool lived_in_wire) {
  auto& state = bucket.window[member];
  auto& gradient = bucket.gradient(member);
  const auto& view = bucket.wire.parts[member];
  const bool has_left = bucket.layout.form().as_bucket_view && !lived_in_wire;
  state.packed = state.in_wire = true;
  if (has_left || !gradient.defined() || state.has_placeholder() || (state.exclusive && fits(gradient, view))) {
    gradient = gradient_in_wire(bucket, member);
  } else {
    state.in_wire = lived_in_wire;
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------- pack, unpack

std::vector<size_t> not_packed(const Bucket& bucket, bool MemberState::* which) {
  std::vector<size_t> members;
  members.reserve(bucket.size());
  for (size_t member = 0; member < bucket.size(); ++member) {
    const auto& state = bucket.window[member];
    if (!state.packed && (which == nullptr || state.*which)) members.push_back(member);
  }
  return members;
}

const at::Tensor& pack(Bucket& bucket, const std::vector<size_t>& members, double scale) {
  auto& window = bucket.window;
  // Members that are packed already were packed on the gradients' streams.
  window.producers.current_stream_waits(bucket.device());
  if (members.empty()) return bucket.wire.tensor();
  const BucketRange range("pack", bucket);
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
  return bucket.wire.tensor();
}

void pack_on_arrival(Bucket& bucket, size_t member, double scale) {
  if (bucket.kernels->pack_on_arrival() || bucket.window.left_in_place) return void(pack(bucket, {member}, scale));
  if (!bucket.layout.form().as_bucket_view || bucket.window.beside < kPartBytes) return;
  pack(bucket, not_packed(bucket, &MemberState::final), scale);
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

// ------------------------------------------------------------------------------------------------------- between two packs

void leave_wire_to_holders(Bucket& bucket) {
  const auto& form = bucket.layout.form();
  if (form.as_bucket_view || form.in_main_grad || !somebody_holds_wire(bucket)) return;
  bucket.take_another_wire();
}

void leave_wire(Bucket& bucket, size_t member) {
  const auto& gradient = std::as_const(bucket).held(member);
  if (bucket.wire.has(gradient)) take_memory_of(gradient, bucket.layout.empty_gradient(member).copy_(gradient));
}

void leave_shared_memory(Bucket& bucket) {
  for (size_t member = 0; member < bucket.size(); ++member) {
    const auto& state = bucket.window[member];
    const auto& gradient = std::as_const(bucket).held(member);
    if (!state.exclusive || state.packed || !gradient.defined()) continue;
    take_memory_of(gradient, bucket.layout.empty_gradient(member).zero_());
  }
}

void settle(Bucket& bucket, size_t member, bool exclusive) {
  const auto& gradient = std::as_const(bucket).held(member);
  const auto& form = bucket.layout.form();
  const bool may_move = exclusive || form.as_bucket_view || form.in_main_grad;
  if (!may_move || !bucket.wire.is_planned() || bucket.window[member].has_placeholder() || !gradient.defined()) return;
  if (!bucket.wire.exists()) bucket.make_wire();
  // Gradients of the last window that somebody kept stay as they are.
  if (!std::exchange(bucket.window.is_settled, true)) leave_wire_to_holders(bucket);
  const auto& view = bucket.wire.parts[member];
  if (!lives_in(view, gradient) && fits(gradient, view)) move_in(bucket, member);
}

void add_to_main(Bucket& bucket, size_t member) {
  auto& arrived = bucket.layout[member].like.mutable_grad();
  check_gradient(bucket, member, arrived);
  settle(bucket, member, /*exclusive=*/false);
  if (!arrived.defined()) return;  // a layer has added to the main gradient
  bucket.held(member).add_(arrived);
  arrived.reset();
}

void place_main(Bucket& bucket, size_t member) {
  auto& gradient = bucket.held(member);
  if (gradient.defined()) return settle(bucket, member, /*exclusive=*/false);
  if (bucket.wire.is_planned() && !bucket.wire.exists()) bucket.make_wire();
  gradient = bucket.wire.exists() ? gradient_in_wire(bucket, member) : bucket.layout.empty_gradient(member);
  gradient.zero_();
}

std::vector<size_t> movable_members(const Bucket& bucket) {
  std::vector<size_t> members;
  if (!bucket.wire.exists() || somebody_holds_wire(bucket)) return members;
  for (size_t member = 0; member < bucket.size(); ++member) {
    if (lives_in(bucket.wire.parts[member], bucket.held(member))) members.push_back(member);
  }
  return members;
}

void move_in(Bucket& bucket, size_t member) {
  if (!bucket.wire.is_planned()) return;
  if (!bucket.wire.exists()) bucket.make_wire();
  auto& gradient = bucket.held(member);
  const auto& view = bucket.wire.parts[member];
  view.copy_(gradient);
  if (bucket.layout.form().as_bucket_view) {
    gradient = gradient_in_wire(bucket, member);
  } else {
    take_memory_of(gradient, view);
  }
}

void zero_wire(Bucket& bucket) {
  if (bucket.shard != nullptr) bucket.shard->zero();
  if (!bucket.wire.exists()) return;
  leave_wire_to_holders(bucket);
  bucket.wire.tensor().zero_();
}

}  // namespace fastddp
