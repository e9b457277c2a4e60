#include "bucket/bucket.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "bucket/bucket_range.h"

namespace fastddp {

void wait_for_gradients(const Bucket& bucket) {
  bucket.producers.current_stream_waits(bucket.device());
}

namespace {

// Note [Aligned members]
void place_members(Bucket& bucket) {
  constexpr size_t alignment = 16;  // bytes
  const auto unit = bucket.placing == Placing::aligned ? alignment / c10::elementSize(bucket.wire_dtype) : 1;
  size_t offset = 0;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    bucket.offsets[member] = offset;
    offset = (offset + bucket.lengths[member] + unit - 1) / unit * unit;
  }
}

// What lies between members and behind the last one.
void zero_gaps(const Bucket& bucket, const at::Tensor& wire) {
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const auto end = static_cast<int64_t>(bucket.offsets[member] + bucket.lengths[member]);
    const bool is_last = member + 1 == bucket.members.size();
    const auto next = is_last ? wire.numel() : static_cast<int64_t>(bucket.offsets[member + 1]);
    if (next > end) wire.narrow(0, end, next - end).zero_();
  }
}

at::TensorOptions wire_options(const Bucket& bucket) {
  return at::TensorOptions().dtype(bucket.wire_dtype).device(bucket.device());
}

void set_wire(Bucket& bucket, const at::Tensor& wire) {
  zero_gaps(bucket, wire);
  use_wire(bucket, wire);
}

// Whether somebody kept a gradient of an earlier window that lives in the wire. The references known here: the wire's
// own, its views' and pieces', and those of gradients that the parameters still have.
bool somebody_holds(const Bucket& bucket) {
  if (!bucket.wire.defined()) return false;
  auto known = 1 + bucket.views.size() + bucket.pieces.size();
  for (size_t member = 0; member < bucket.parameters.size(); ++member) {
    const auto& gradient = bucket.holders[member].grad();
    const auto& placeholder = bucket.gradients[member].placeholder;
    const bool is_in_wire = gradient.defined() && gradient.is_alias_of(bucket.wire);
    if (is_in_wire && !lives_in(bucket.views[member], gradient)) return true;  // in the place of another member
    known += is_in_wire;
    known += placeholder.defined() && placeholder.is_alias_of(bucket.wire);
  }
  return bucket.wire.storage().use_count() > known;
}

// Then the wire is theirs, and the bucket takes a new one.
void leave_wire_to_holders(Bucket& bucket) {
  const bool is_overwritten = bucket.form.as_bucket_view || bucket.form.in_main_grad;
  // Note [Memory of wires]: not from a group's.
  if (!is_overwritten && somebody_holds(bucket)) set_wire(bucket, empty_wire(bucket));
}

void check_gradient(const Bucket& bucket, size_t member, const at::Tensor& gradient) {
  const auto& parameter = bucket.parameters[member];
  if (!gradient.defined()) return;
  TORCH_CHECK(!gradient.is_sparse(), "fastddp: parameter ", bucket.names[member], " in bucket ", bucket.index,
              " got a sparse gradient, which is not supported; build its module with sparse=False, or exclude it with "
              "_set_params_and_buffers_to_ignore_for_model.");
  TORCH_CHECK(gradient.sizes() == parameter.sizes() && gradient.device() == parameter.device(),
              "fastddp: the gradient of parameter ", bucket.names[member], " in bucket ", bucket.index, " has shape ",
              gradient.sizes(), " on ", gradient.device(), ", its parameter ", parameter.sizes(), " on ",
              parameter.device(),
              ": was the parameter replaced or moved after the model was wrapped? Wrap it after such "
              "changes.");
}

// Note [Where gradients live]
void place_gradient(Bucket& bucket, size_t member, bool lived_in_wire) {
  auto& state = bucket.gradients[member];
  auto& gradient = bucket.gradient(member);
  const auto& view = bucket.views[member];
  state.packed = true;
  if (!bucket.wire_is_home) return;
  state.in_wire = true;
  if (bucket.form.as_bucket_view && !state.has_placeholder) {
    gradient = view;
  } else if (!gradient.defined() || state.has_placeholder || (state.exclusive && fits(gradient, view))) {
    gradient = as_gradient(view);
  } else {
    state.in_wire = lived_in_wire;
  }
}

// Whether packing a gradient frees its memory.
bool pack_frees(const Bucket& bucket) {
  return bucket.form.as_bucket_view && bucket.wire_is_home;
}

// Behind wait_for_gradients().
void pack_members(Bucket& bucket, const std::vector<size_t>& members, double scale) {
  bucket.beside = 0;
  if (!bucket.wire.defined()) make_wire(bucket);
  const auto first = std::none_of(bucket.gradients.begin(), bucket.gradients.end(), [](auto& g) { return g.packed; });
  if (first) leave_wire_to_holders(bucket);
  std::vector<Slot> slots;
  slots.reserve(members.size());
  std::vector<size_t> left_alone;
  for (const auto member : members) {
    const auto gradient = bucket.gradient(member);
    const auto& view = bucket.views[member];
    const bool lived_in_wire = lives_in(view, gradient);
    if (!lived_in_wire || scale != 1.0) {
      slots.push_back({gradient, view, member});
    } else {
      left_alone.push_back(member);
    }
    if (!lived_in_wire) keep_for_current_stream(gradient);
    place_gradient(bucket, member, lived_in_wire);
  }
  if (!slots.empty()) bucket.kernels->pack(slots, scale, bucket.packs++, sums_of_packed(bucket, slots));
  if (!left_alone.empty()) measure_local(bucket, left_alone);
}

// Those for which `ready` says so, of what is not packed.
template <typename Ready>
std::vector<size_t> unpacked_members(const Bucket& bucket, const Ready& ready) {
  std::vector<size_t> members;
  members.reserve(bucket.members.size());
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const auto& state = bucket.gradients[member];
    if (!state.packed && ready(state)) members.push_back(member);
  }
  return members;
}

}  // namespace

Bucket::Bucket(size_t index, size_t count, std::vector<size_t> members, const std::vector<at::Tensor>& all_parameters,
               const std::vector<at::Tensor>& all_holders, const std::vector<std::string>& all_names, GradientForm form)
    : index(index), count(count), members(std::move(members)), form(form) {
  for (const auto member : this->members) {
    const auto& parameter = all_parameters[member];
    const size_t parts = parameter.is_complex() ? 2 : 1;
    parameters.push_back(parameter);
    holders.push_back(all_holders[member]);
    names.push_back(all_names[member]);
    lengths.push_back(parameter.numel() * parts);
    sizes.push_back(parameter.sizes().vec());
    if (parameter.is_complex()) sizes.back().push_back(2);
  }
  wire_dtype = gradient_dtype();
  offsets.resize(lengths.size());
  place_members(*this);
  kernels = make_kernels(device());
  reset();
}

c10::Device Bucket::device() const {
  return parameters.front().device();
}

c10::ScalarType Bucket::gradient_dtype() const {
  return c10::toRealValueType(form.dtype_of(parameters.front()));
}

int64_t Bucket::elements() const {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

int64_t Bucket::extent() const {
  return static_cast<int64_t>(offsets.back() + lengths.back());
}

void Bucket::reset() {
  gradients.assign(members.size(), Gradient());
  packs = beside = measurings = 0;
  rewritten = is_settled = false;
  if (local_sums) local_sums->reset();
  producers.clear();
  kept.let_go();
  measured.clear();
}

at::Tensor& Bucket::gradient(size_t member) {
  auto& state = gradients[member];
  return state.has_placeholder ? state.placeholder : holders[member].mutable_grad();
}

const at::Tensor& Bucket::gradient(size_t member) const {
  const auto& state = gradients[member];
  return state.has_placeholder ? state.placeholder : holders[member].grad();
}

void set_wire_format(Bucket& bucket, c10::ScalarType dtype, Placing placing, int64_t unit) {
  bucket.wire_is_home = dtype == bucket.gradient_dtype();
  if (bucket.wire_dtype == dtype && bucket.placing == placing && bucket.wire_unit == unit) return;
  bucket.wire_dtype = dtype;
  bucket.placing = placing;
  bucket.wire_unit = unit;
  place_members(bucket);
  drop_wire(bucket);
}

void make_wire(Bucket& bucket) {
  set_wire(bucket, bucket.memory ? bucket.memory(wire_length(bucket), wire_options(bucket)) : empty_wire(bucket));
}

void use_wire(Bucket& bucket, const at::Tensor& wire) {
  drop_wire(bucket);
  bucket.wire = wire;
  for (size_t member = 0; member < bucket.parameters.size(); ++member) {
    bucket.views.push_back(view_of(wire, bucket.parameters[member], bucket.offsets[member]));
  }
}

void note_use_of_wire(Bucket& bucket, const at::Tensor& wire) {
  if (bucket.lends_wire()) {
    bucket.kept.add(wire);
  } else {
    keep_for_current_stream(wire);
  }
}

void drop_wire(Bucket& bucket) {
  bucket.wire.reset();
  bucket.pieces.clear();
  bucket.views.clear();
}

void do_without_wire(Bucket& bucket) {
  drop_wire(bucket);
  bucket.memory = nullptr;
  bucket.wire_is_home = false;
}

at::Tensor empty_gradient(const Bucket& bucket, size_t member) {
  const auto& parameter = bucket.parameters[member];
  return empty_gradient(parameter, bucket.form.dtype_of(parameter));
}

int64_t wire_length(const Bucket& bucket) {
  const auto unit = bucket.wire_unit;
  return (bucket.extent() + unit - 1) / unit * unit;
}

at::Tensor empty_wire(const Bucket& bucket) {
  return at::empty({wire_length(bucket)}, wire_options(bucket));
}

void fill_wire(const Bucket& bucket, const at::Tensor& wire, double value) {
  wire.fill_(value);
  zero_gaps(bucket, wire);
}

void arrive(Bucket& bucket, size_t member, bool exclusive) {
  const auto& gradient = bucket.holders[member].grad();
  check_gradient(bucket, member, gradient);
  auto& state = bucket.gradients[member];
  state = {};
  state.final = true;
  state.exclusive = exclusive;
  const bool is_beside = gradient.defined() && !(bucket.wire.defined() && gradient.is_alias_of(bucket.wire));
  if (is_beside) bucket.beside += gradient.nbytes();
}

void leave_wire(Bucket& bucket, size_t member) {
  const auto& gradient = bucket.holders[member].grad();
  if (!gradient.defined() || !bucket.wire.defined() || !gradient.is_alias_of(bucket.wire)) return;
  take_memory_of(gradient, empty_gradient(bucket, member).copy_(gradient));
}

void use_placeholder(Bucket& bucket, size_t member, bool counts) {
  auto& gradient = bucket.holders[member].mutable_grad();
  check_gradient(bucket, member, gradient);
  auto& state = bucket.gradients[member];
  state.has_placeholder = state.may_be_dropped = true;
  state.was_empty = !gradient.defined();
  if (state.was_empty) return;
  auto copy = empty_gradient(bucket, member).copy_(gradient);
  bucket.producers.note(bucket.device());
  if (!bucket.wire.defined() || !gradient.is_alias_of(bucket.wire)) {
    state.placeholder = counts ? std::move(copy) : copy.zero_();
    return;
  }
  // A collective would write to it: it leaves the wire, as the tensor that it is unless that is the bucket's own view.
  state.placeholder = as_gradient(bucket.views[member]);
  if (bucket.form.as_bucket_view) {
    gradient = std::move(copy);
  } else {
    take_memory_of(gradient, copy);
  }
  if (!counts) state.placeholder.zero_();
}

void note_rewritten(Bucket& bucket) {
  bucket.rewritten = true;
  bucket.measured.clear();
}

void note_unexpected(Bucket& bucket, size_t member, const at::Tensor& incoming) {
  auto& state = bucket.gradients[member];
  if (!state.has_placeholder || state.was_empty) return;
  const auto gradient = incoming.to(bucket.form.dtype_of(bucket.parameters[member]));
  state.unexpected = state.unexpected.defined() ? at::add(state.unexpected, gradient) : gradient;
}

at::Tensor left_out(const Bucket& bucket, size_t member) {
  const auto& state = bucket.gradients[member];
  if (!state.has_placeholder) return {};
  return state.was_empty ? bucket.holders[member].grad() : state.unexpected;
}

void resolve_placeholder(Bucket& bucket, size_t member, bool used) {
  auto& state = bucket.gradients[member];
  auto& gradient = bucket.holders[member].mutable_grad();
  state.has_placeholder = false;
  if (!used) return note_rewritten(bucket);
  if (!gradient.defined()) gradient = empty_gradient(bucket, member);
  about_to_write(gradient);
  if (!state.placeholder.defined()) {  // nothing came of it: an exchange over this rank alone
    gradient.zero_();
    return;
  }
  gradient.copy_(state.placeholder);  // which lives until the next window, when it has been read
}

void pack(Bucket& bucket, double scale) {
  const auto members = unpacked_members(bucket, [](const auto&) { return true; });
  // What is packed already was packed on the streams of gradients.
  wait_for_gradients(bucket);
  if (members.empty()) return;
  const BucketRange range("pack", bucket);
  pack_members(bucket, members, scale);
}

void pack_on_arrival(Bucket& bucket, size_t member, double scale) {
  std::vector<size_t> members{member};
  if (!bucket.kernels->pack_on_arrival() && !bucket.left_in_place) {
    if (!pack_frees(bucket) || bucket.beside < kPartBytes) return;
    members = unpacked_members(bucket, [](const auto& gradient) { return gradient.final; });
  }
  const BucketRange range("pack", bucket);
  wait_for_gradients(bucket);
  pack_members(bucket, members, scale);
}

void unpack(Bucket& bucket, const at::Tensor& result) {
  const auto is_wire = result.is_same(bucket.wire);
  std::vector<Slot> slots;
  slots.reserve(bucket.parameters.size());
  for (size_t member = 0; member < bucket.parameters.size(); ++member) {
    if (is_wire && bucket.gradients[member].in_wire) continue;
    const auto& parameter = bucket.parameters[member];
    auto& gradient = bucket.gradient(member);
    if (!gradient.defined()) gradient = empty_gradient(bucket, member);
    bump_version(gradient);
    slots.push_back({gradient, is_wire ? bucket.views[member] : view_of(result, parameter, bucket.offsets[member])});
  }
  if (slots.empty()) return;
  const BucketRange range("unpack", bucket);
  for (const auto& slot : slots) bucket.kept.add(slot.gradient);
  const auto found = bucket.kernels->unpack(slots, slots.size() == bucket.parameters.size());
  if (found.defined()) bucket.measured = {found};
}

std::vector<size_t> movable_members(const Bucket& bucket) {
  std::vector<size_t> members;
  if (!bucket.wire.defined() || somebody_holds(bucket)) return members;
  for (size_t member = 0; member < bucket.parameters.size(); ++member) {
    const auto& gradient = bucket.holders[member].grad();
    if (lives_in(bucket.views[member], gradient)) members.push_back(member);
  }
  return members;
}

void move_in(Bucket& bucket, size_t member) {
  if (!bucket.wire_is_home) return;
  if (!bucket.wire.defined()) make_wire(bucket);
  auto& gradient = bucket.holders[member].mutable_grad();
  const auto& view = bucket.views[member];
  view.copy_(gradient);
  if (bucket.form.as_bucket_view) {
    gradient = view;
  } else {
    take_memory_of(gradient, view);
  }
}

void settle(Bucket& bucket, size_t member, bool exclusive) {
  const auto& gradient = bucket.holders[member].grad();
  const bool may_move = exclusive || bucket.form.as_bucket_view || bucket.form.in_main_grad;
  if (!may_move || !bucket.wire_is_home || bucket.gradients[member].has_placeholder || !gradient.defined()) return;
  if (!bucket.wire.defined()) make_wire(bucket);
  // What somebody kept of the last window stays as it is.
  if (!std::exchange(bucket.is_settled, true)) leave_wire_to_holders(bucket);
  const auto& view = bucket.views[member];
  if (lives_in(view, gradient) || !fits(gradient, view)) return;
  move_in(bucket, member);
}

void add_to_main(Bucket& bucket, size_t member) {
  auto& arrived = bucket.parameters[member].mutable_grad();
  check_gradient(bucket, member, arrived);
  settle(bucket, member, /*exclusive=*/false);
  bucket.holders[member].mutable_grad().add_(arrived);
  arrived.reset();
}

void place_main(Bucket& bucket, size_t member) {
  auto& gradient = bucket.holders[member].mutable_grad();
  if (gradient.defined()) return settle(bucket, member, /*exclusive=*/false);
  if (bucket.wire_is_home && !bucket.wire.defined()) make_wire(bucket);
  gradient = bucket.wire_is_home ? as_gradient(bucket.views[member]) : empty_gradient(bucket, member);
  gradient.zero_();
}

void zero_wire(Bucket& bucket) {
  if (!bucket.wire.defined()) return;
  leave_wire_to_holders(bucket);
  bucket.wire.zero_();
}

}  // namespace fastddp
