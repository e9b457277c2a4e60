#include "bucket/bucket.h"

#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>

#include "bucket/bucket_range.h"
#include "bucket/own_shard.h"
#include "errors/see.h"

namespace fastddp {

Bucket::Bucket(Layout layout, std::vector<at::Tensor> holders)
    : layout(std::move(layout)),
      window(this->layout.size()),
      kernels(make_kernels(this->layout.device())),
      holders_(std::move(holders)),
      marks_(this->layout.size()) {}

at::Tensor Bucket::own_gradient(size_t member) const {
  return shard == nullptr ? held(member) : shard->own_gradient(member, held(member));
}

at::Tensor& Bucket::gradient_to_write(size_t member) {
  auto& gradient = this->gradient(member);
  if (!gradient.defined()) gradient = layout.empty_gradient(member);
  bump_version(gradient);
  return gradient;
}

void Bucket::become_sharded(std::shared_ptr<OwnShard> own, Grid grid) {
  shard = std::move(own);
  if (layout.set_grid(grid)) wire.drop();
}

void Bucket::note_use_of_wire(const at::Tensor& wire) {
  if (lends_wire()) {
    window.kept.add(wire);
  } else {
    keep_for_current_stream(wire);
  }
}

// ------------------------------------------------------------------------------------------------------ a gradient comes

void Bucket::check_gradient(size_t member, const at::Tensor& gradient) const {
  if (!gradient.defined()) return;
  const auto& [span, like, name] = layout[member];
  TORCH_CHECK(!gradient.is_sparse(), "fastddp: parameter ", name, " in bucket ", index(),
              " got a sparse gradient, which is not supported; build its module with sparse=False, or exclude it with "
              "_set_params_and_buffers_to_ignore_for_model.",
              see("FD009"));
  TORCH_CHECK(gradient.sizes() == like.sizes() && gradient.device() == like.device(), "fastddp: the gradient of parameter ",
              name, " in bucket ", index(), " has shape ", gradient.sizes(), " on ", gradient.device(), ", its parameter ",
              like.sizes(), " on ", like.device(),
              ": was the parameter replaced or moved after the model was wrapped? Wrap it after such "
              "changes.",
              see("FD012"));
}

void Bucket::arrive(size_t member, bool exclusive) {
  const auto& gradient = std::as_const(*this).held(member);
  check_gradient(member, gradient);
  window[member] = {.final = true, .exclusive = exclusive};
  if (gradient.defined() && !wire.has(gradient)) window.beside += gradient.nbytes();
}

void Bucket::settle(size_t member, bool exclusive) {
  const auto& gradient = std::as_const(*this).held(member);
  const bool may_move = exclusive || layout.form().as_bucket_view || layout.form().in_main_grad;
  if (!may_move || !wire.is_home() || window[member].has_placeholder() || !gradient.defined()) return;
  if (!wire.exists()) wire.make(layout);
  // Gradients of the last window that somebody kept stay as they are.
  if (!std::exchange(window.is_settled, true)) leave_wire_to_holders();
  if (lives_in(wire.view(member), gradient) || !fits(gradient, wire.view(member))) return;
  move_in(member);
}

void Bucket::add_to_main(size_t member) {
  auto& arrived = layout[member].like.mutable_grad();
  check_gradient(member, arrived);
  settle(member, /*exclusive=*/false);
  if (!arrived.defined()) return;  // a layer has added to the main gradient
  held(member).add_(arrived);
  arrived.reset();
}

void Bucket::place_main(size_t member) {
  auto& gradient = held(member);
  if (gradient.defined()) return settle(member, /*exclusive=*/false);
  if (wire.is_home() && !wire.exists()) wire.make(layout);
  gradient = wire.is_home() ? as_gradient(wire.view(member)) : layout.empty_gradient(member);
  gradient.zero_();
}

// ---------------------------------------------------------------------------------------------------- note [Placeholders]

void Bucket::take_notice(size_t member) {
  // If there is a placeholder, the notice has been taken away for it.
  if (shard == nullptr || window[member].has_placeholder()) return;
  auto& gradient = held(member);
  if (shard->was_taken_back(member) && !still_holds(member)) shard->forget(member, /*is_zero=*/gradient.defined());
  if (shard->take_back(member, gradient)) marks_[member].set({});
}

void Bucket::use_placeholder(size_t member, bool counts) {
  take_notice(member);
  auto& gradient = held(member);
  check_gradient(member, gradient);
  auto& state = window[member];
  state.may_be_dropped = true;
  auto& placeholder = state.placeholder.emplace();
  placeholder.was_empty = !gradient.defined();
  if (placeholder.was_empty) return;
  auto copy = layout.empty_gradient(member).copy_(gradient);
  placeholder.before = copy.clone();
  window.producers.note(device());
  if (!wire.has(gradient)) {
    placeholder.gradient = counts ? std::move(copy) : copy.zero_();
    return;
  }
  // A collective would write to the gradient, so it leaves the wire. It stays the same tensor unless it is the bucket's own view.
  placeholder.gradient = as_gradient(wire.view(member));
  if (layout.form().as_bucket_view) {
    gradient = std::move(copy);
  } else {
    take_memory_of(gradient, copy);
  }
  if (!counts) placeholder.gradient.zero_();
}

void Bucket::note_unexpected(size_t member, const at::Tensor& incoming) {
  auto& state = window[member];
  if (!state.has_placeholder() || state.placeholder->was_empty) return;
  auto& unexpected = state.placeholder->unexpected;
  if (!incoming.defined()) return void(unexpected = at::sub(held(member), state.placeholder->before));
  const auto gradient = incoming.to(layout.form().dtype_of(layout[member].like));
  unexpected = unexpected.defined() ? at::add(unexpected, gradient) : gradient;
}

void Bucket::resolve_placeholder(size_t member, bool used) {
  auto& placeholder = *window[member].placeholder;
  placeholder.is_over = true;
  auto& gradient = held(member);
  if (shard != nullptr) return used ? shard->finish(member, gradient) : shard->restore(member, gradient);
  if (!used) return note_rewritten();
  if (!gradient.defined()) gradient = layout.empty_gradient(member);
  about_to_write(gradient);
  if (placeholder.gradient.defined()) {
    gradient.copy_(placeholder.gradient);
  } else {
    gradient.zero_();  // nothing has come back: an exchange over this rank alone
  }
}

void Bucket::add_late(size_t member, const Bucket& late, size_t from) {
  if (shard != nullptr) {
    const auto whole = late.wire.tensor().narrow(0, late.layout.offset(from), late.layout.length(from));
    return shard->add(*this, member, whole);
  }
  note_rewritten();
  about_to_write(held(member)).add_(late.wire.view(from));
}

// ------------------------------------------------------------------------------------------ gradients to the wire, and back

// Whether somebody kept a gradient of an earlier window that lives in the wire. `known` counts the references that are not the
// wire's own: gradients that parameters still have, and placeholders.
bool Bucket::somebody_holds_wire() const {
  if (!wire.exists()) return false;
  size_t known = 0;
  for (size_t member = 0; member < size(); ++member) {
    const auto& gradient = held(member);
    const auto& placeholder = window[member].placeholder;
    const bool is_in_wire = wire.has(gradient);
    if (is_in_wire && !lives_in(wire.view(member), gradient)) return true;  // at another member's place
    known += is_in_wire;
    known += placeholder && wire.has(placeholder->gradient);
  }
  return wire.is_held_beside(known);
}

// If somebody holds the wire, leaves it to them and takes a new one.
void Bucket::leave_wire_to_holders() {
  const bool is_overwritten = layout.form().as_bucket_view || layout.form().in_main_grad;
  if (!is_overwritten && somebody_holds_wire()) wire.make_another(layout);
}

// Note [Where gradients live]
void Bucket::place_gradient(size_t member, bool lived_in_wire) {
  auto& state = window[member];
  auto& gradient = this->gradient(member);
  const auto& view = wire.view(member);
  const bool has_placeholder = state.has_placeholder();
  state.packed = true;
  if (!wire.is_home()) return;
  state.in_wire = true;
  if (layout.form().as_bucket_view && !has_placeholder) {
    gradient = view;
  } else if (!gradient.defined() || has_placeholder || (state.exclusive && fits(gradient, view))) {
    gradient = as_gradient(view);
  } else {
    state.in_wire = lived_in_wire;
  }
}

// After wait_for_gradients().
void Bucket::pack_members(const std::vector<size_t>& members, double scale) {
  window.beside = 0;
  if (!wire.exists()) wire.make(layout);
  if (window.none_is_packed()) leave_wire_to_holders();
  std::vector<Slot> slots;
  slots.reserve(members.size());
  std::vector<size_t> left_alone;
  for (const auto member : members) {
    const auto gradient = this->gradient(member);
    const auto& view = wire.view(member);
    const bool lived_in_wire = lives_in(view, gradient);
    if (!lived_in_wire || scale != 1.0) {
      slots.push_back({gradient, view, member});
    } else {
      left_alone.push_back(member);
    }
    if (!lived_in_wire) keep_for_current_stream(gradient);
    place_gradient(member, lived_in_wire);
  }
  if (!slots.empty()) kernels->pack(slots, scale, window.packs++, sums_of_packed(slots));
  if (!left_alone.empty()) measure_local(left_alone);
}

void Bucket::pack(double scale) {
  const auto members = window.unpacked();
  // Members that are packed already were packed on the gradients' streams.
  wait_for_gradients();
  if (members.empty()) return;
  const BucketRange range("pack", *this);
  pack_members(members, scale);
}

void Bucket::pack_on_arrival(size_t member, double scale) {
  std::vector<size_t> members{member};
  if (!kernels->pack_on_arrival() && !window.left_in_place) {
    if (!pack_frees() || window.beside < kPartBytes) return;
    members = window.unpacked(&MemberState::final);
  }
  const BucketRange range("pack", *this);
  wait_for_gradients();
  pack_members(members, scale);
}

void Bucket::unpack(const at::Tensor& result) {
  const bool is_wire = result.is_same(wire.tensor());
  std::vector<Slot> slots;
  slots.reserve(size());
  for (size_t member = 0; member < size(); ++member) {
    if (is_wire && window[member].in_wire) continue;
    slots.push_back({gradient_to_write(member), is_wire ? wire.view(member) : layout.view(result, member)});
  }
  if (slots.empty()) return;
  const BucketRange range("unpack", *this);
  for (const auto& slot : slots) window.kept.add(slot.gradient);
  const auto found = kernels->unpack(slots, slots.size() == size());
  if (found.defined()) window.measured = {found};
}

// ------------------------------------------------------------------------------------------------------ between two windows

std::vector<size_t> Bucket::movable_members() const {
  std::vector<size_t> members;
  if (!wire.exists() || somebody_holds_wire()) return members;
  for (size_t member = 0; member < size(); ++member) {
    if (lives_in(wire.view(member), held(member))) members.push_back(member);
  }
  return members;
}

void Bucket::move_in(size_t member) {
  if (!wire.is_home()) return;
  if (!wire.exists()) wire.make(layout);
  auto& gradient = held(member);
  const auto& view = wire.view(member);
  view.copy_(gradient);
  if (layout.form().as_bucket_view) {
    gradient = view;
  } else {
    take_memory_of(gradient, view);
  }
}

void Bucket::zero_wire() {
  if (shard != nullptr) shard->zero();
  if (!wire.exists()) return;
  leave_wire_to_holders();
  wire.tensor().zero_();
}

}  // namespace fastddp
