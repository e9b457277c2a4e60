// A bucket: the gradients that travel together, and the wire they travel on.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bucket/bucket_window.h"
#include "bucket/gradient_mark.h"
#include "bucket/layout.h"
#include "bucket/wire.h"
#include "pack/kernels.h"

namespace fastddp {

class OwnShard;

// Note [Where gradients live]
// With gradient_as_bucket_view, `parameter.grad` is a view of the wire. It is always the same view, and every window
// overwrites it: this is torch's contract for the option.
//
// Without it, a gradient's values belong to whoever holds the gradient. They need not be copied for that:
// - A gradient that only its parameter refers to gets the wire's memory when it has been packed. This saves the unpack kernel,
//   and autograd's memory is free for the next gradient while it is still in cache.
// - A gradient that someone else refers to stays where it is, and unpack writes the average there.
// - If someone keeps a gradient in the wire's memory beyond the next window, the wire is theirs. The bucket takes a new one.
class Bucket {
 public:
  // `holders`: by member, the tensor whose .grad() is the gradient: the parameter or another tensor; note [Main gradients].
  Bucket(Layout layout, std::vector<at::Tensor> holders);

  Layout layout;
  Wire wire;
  BucketWindow window;  // the state of the current window
  // Measures of this rank's gradients in the last window, if somebody wants them; note [Local sums], pack/local_sums.h.
  std::optional<LocalSums> local_sums;
  std::unique_ptr<Kernels> kernels;
  // Null: this rank gets all averages. Note [Sharded gradients], own_shard.h.
  std::shared_ptr<OwnShard> shard;

  size_t index() const { return layout.index(); }
  size_t size() const { return layout.size(); }
  c10::Device device() const { return layout.device(); }
  // Note [Lent wires], wire.h: what travels has memory during a window only.
  bool lends_wire() const { return layout.form().lazy_bucket_allocation && (shard != nullptr || !wire.is_home()); }

  // `parameter.grad`, or the main gradient.
  const at::Tensor& held(size_t member) const { return holders_[member].grad(); }
  at::Tensor& held(size_t member) { return holders_[member].mutable_grad(); }
  // held(member), or the placeholder that travels in its place.
  const at::Tensor& gradient(size_t member) const {
    const auto& state = window[member];
    return state.has_placeholder() ? state.placeholder->gradient : held(member);
  }
  at::Tensor& gradient(size_t member) {
    auto& state = window[member];
    return state.has_placeholder() ? state.placeholder->gradient : held(member);
  }
  // held(member), or the gradient of this rank's span of it.
  at::Tensor own_gradient(size_t member) const;
  // The gradient, for a codec or unpack to write. Makes memory where there is none, and gives autograd a new version.
  at::Tensor& gradient_to_write(size_t member);

  // Begins a window.
  void reset() {
    window.reset();
    if (local_sums) local_sums->reset();
  }

  // Each rank gets the averages of its own spans only, from the next window on.
  void become_sharded(std::shared_ptr<OwnShard> own, Grid grid);

  // Sets the wire's format from the next window on. Gradients never live in a cast wire: they stay where autograd put them.
  void set_wire_format(WireFormat format) {
    const bool is_another = layout.set_format(format);
    wire.set_home(layout.can_be_home());
    if (is_another) wire.drop();
  }
  // The same for the elements that follow the gradients (Layout::tail).
  void set_wire_tail(int64_t elements) {
    if (layout.set_tail(elements)) wire.drop();
  }
  // The current stream, a side stream, uses the memory of `wire`.
  void note_use_of_wire(const at::Tensor& wire);

  // --- A gradient comes

  // The member's gradient is final. `exclusive`: nobody but the parameter refers to its memory.
  void arrive(size_t member, bool exclusive);
  // Moves the gradient out of the wire, if it lives there, into memory of its own.
  void leave_wire(size_t member) {
    const auto& gradient = std::as_const(*this).held(member);
    if (wire.has(gradient)) take_memory_of(gradient, layout.empty_gradient(member).copy_(gradient));
  }
  // Between the microbatches of a window: moves the gradient into the wire, if it may live there. The next microbatch is added to
  // it there. It must be `exclusive`, except with gradient_as_bucket_view and for main gradients. Note [Main gradients].
  void settle(size_t member, bool exclusive);
  // Adds `parameter.grad`, if there is one, to the main gradient, and frees it.
  void add_to_main(size_t member);
  // Moves the main gradient into the wire, if it may live there. A new main gradient is zero.
  void place_main(size_t member);
  // Makes the current stream wait for all gradients that have come.
  void wait_for_gradients() const { window.producers.current_stream_waits(device()); }

  // --- Note [Placeholders], bucket_window.h

  // From now on a placeholder travels in place of the member's gradient. It has the gradient's values if these `counts`, else
  // zeros.
  void use_placeholder(size_t member, bool counts);
  // The same for each member for which `which(member)` is true and that has no placeholder yet.
  template <typename Which, typename Counts>
  void use_placeholders(const Which& which, const Counts& counts) {
    for (size_t member = 0; member < size(); ++member) {
      if (window[member].has_placeholder() || !which(member)) continue;
      use_placeholder(member, counts(layout.parameter(member)));
    }
  }
  // A gradient came nevertheless: autograd has added `incoming` to what the parameter had. Undefined: a layer has written it.
  void note_unexpected(size_t member, const at::Tensor& incoming);
  // The gradient that the placeholder leaves out; undefined: none.
  at::Tensor left_out(size_t member) const {
    const auto& state = window[member];
    if (!state.has_placeholder()) return {};
    return state.placeholder->was_empty ? held(member) : state.placeholder->unexpected;
  }
  // Ends the placeholder. If anybody `used` the parameter, the gradient becomes what the exchange has made of the placeholder.
  void resolve_placeholder(size_t member, bool used);
  // If this bucket is sharded: if the member's gradient is a notice, takes it away, so that autograd can write a gradient.
  void take_notice(size_t member);
  // Note [What a gradient still holds], gradient_mark.h. The mark outlives windows.
  void mark(size_t member) { marks_[member].set(std::as_const(*this).held(member)); }
  bool still_holds(size_t member) const { return marks_[member].still_holds(held(member)); }
  // Adds to the member's average: it is the average of `late`, in the place of that bucket's member `from`.
  void add_late(size_t member, const Bucket& late, size_t from);

  // --- Gradients to the wire, and back

  // Packs all members that are not packed yet, by one kernel, scaled by `scale`. A parameter without a gradient contributes
  // zeros. A gradient that is in the wire already needs no kernel if `scale` is 1. Runs on the current stream, after all
  // producers.
  void pack(double scale);
  // Packs on arrival where that pays: this member, or all that have come (note [When to pack], kernels.h).
  void pack_on_arrival(size_t member, double scale);
  // Unpacks all members whose gradient is not in the wire, by one kernel. It also measures the gradients if it writes all of
  // them. `result` is the wire or a tensor laid out like it. Runs on the current stream.
  void unpack(const at::Tensor& result);

  // --- Sums of squares and counts of what is not finite, before and after ranks have added up gradients (measuring.cpp)

  // Measures these members' gradients into `local_sums`, unless it has them or is not there. For gradients that pack() does not
  // read. The current stream has waited for them.
  void measure_local(const std::vector<size_t>& members);
  // The same for all members, after all producers.
  void measure_local();
  // `slots` are about to be packed. Returns where their kernel leaves its sums, or null.
  LocalSums* sums_of_packed(const std::vector<Slot>& slots) {
    if (!local_sums) return nullptr;
    for (const auto& slot : slots) window[slot.member].measured = true;
    return &*local_sums;
  }
  // Averaged gradients are no longer what the exchange wrote.
  void note_rewritten() {
    window.rewritten = true;
    window.measured.clear();
  }
  // `BucketWindow::measured`. If unpack has not seen all gradients, one kernel reads them from the wire, on the current stream.
  const std::vector<at::Tensor>& measure() {
    if (!wire.exists()) return measure_gradients();  // note [Lent wires]
    if (window.measured.empty()) window.measured = {kernels->measure(wire.tensor())};
    return window.measured;
  }
  // The same, read from each gradient instead of the wire.
  const std::vector<at::Tensor>& measure_gradients();

  // --- Between two windows

  // The members whose gradients live in the wire and may move to another one. None, if anybody but parameters refers to the wire.
  std::vector<size_t> movable_members() const;
  // Moves the member's gradient and its values into the wire, if gradients can live there.
  void move_in(size_t member);
  // Zeroes the wire, and so the gradients that live there. Gradients of a failed window are void: a collective may have written
  // to them after the caller set them to zero.
  void zero_wire();

 private:
  void check_gradient(size_t member, const at::Tensor& gradient) const;
  bool somebody_holds_wire() const;
  void leave_wire_to_holders();
  void pack_members(const std::vector<size_t>& members, double scale);
  void place_gradient(size_t member, bool lived_in_wire);
  bool pack_frees() const { return layout.form().as_bucket_view && wire.is_home(); }

  std::vector<at::Tensor> holders_;
  std::vector<GradientMark> marks_;
};

}  // namespace fastddp
