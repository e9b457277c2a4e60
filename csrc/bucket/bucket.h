// A bucket: the gradients that travel together, and the wire they travel on.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "bucket/bucket_window.h"
#include "bucket/layout.h"
#include "bucket/wire.h"
#include "pack/kernels.h"

namespace fastddp {

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
  // `holders`: tensors whose .grad() is the gradient, by member: parameters, or others; note [Main gradients].
  Bucket(Layout layout, std::vector<at::Tensor> holders);

  Layout layout;
  Wire wire;
  BucketWindow window;  // of this window
  // Of the last window, where somebody wants to know: what this rank's gradients were; note [Local sums], pack/local_sums.h.
  std::optional<LocalSums> local_sums;
  std::unique_ptr<Kernels> kernels;

  size_t index() const { return layout.index(); }
  size_t size() const { return layout.size(); }
  c10::Device device() const { return layout.device(); }
  // Note [Lent wires], wire.h: what travels is there during a window only.
  bool lends_wire() const { return layout.form().lends_wires && !wire.is_home(); }

  // `parameter.grad`, or the main gradient.
  const at::Tensor& held(size_t member) const { return holders_[member].grad(); }
  at::Tensor& held(size_t member) { return holders_[member].mutable_grad(); }
  // That, or the placeholder which travels in its place.
  const at::Tensor& gradient(size_t member) const;
  at::Tensor& gradient(size_t member);
  // What a codec or unpack writes to: memory that is made where there is none, and a new version for autograd.
  at::Tensor& gradient_to_write(size_t member);

  // Begins a window.
  void reset();

  // Says what the wire has to be from the next window on. A cast wire is never where gradients live: they stay where autograd
  // put them.
  void set_wire_format(WireFormat format);
  // The current stream, a side stream, uses the memory of what travels.
  void note_use_of_wire(const at::Tensor& wire);

  // --- A gradient comes

  // It is final. `exclusive`: nobody but the parameter has a hand on its memory.
  void arrive(size_t member, bool exclusive);
  // It has memory of its own from now on, if it lives in the wire.
  void leave_wire(size_t member);
  // Between the microbatches of a window: the gradient moves into the wire, if it may live there and nobody else has a hand on
  // it, and the next one is added to it there. Note [Main gradients].
  void settle(size_t member, bool exclusive);
  // Takes what autograd has left in `parameter.grad` to the main gradient; it has to be there.
  void add_to_main(size_t member);
  // The main gradient is in the wire, if it may live there; the first time it is zero.
  void place_main(size_t member);
  // Makes the current stream wait for all gradients that have come.
  void wait_for_gradients() const { window.producers.current_stream_waits(device()); }

  // --- Note [Placeholders], bucket_window.h

  // From now on a placeholder travels in place of the member's gradient; zeros, unless what that holds `counts`.
  void use_placeholder(size_t member, bool counts);
  // Of those for which `which(member)` says so and for which none travels yet.
  template <typename Which, typename Counts>
  void use_placeholders(const Which& which, const Counts& counts) {
    for (size_t member = 0; member < size(); ++member) {
      if (window[member].has_placeholder() || !which(member)) continue;
      use_placeholder(member, counts(layout.parameter(member)));
    }
  }
  // A gradient came all the same: autograd has added `incoming` to what the parameter had.
  void note_unexpected(size_t member, const at::Tensor& incoming);
  // What the placeholder has left out; undefined: nothing.
  at::Tensor left_out(size_t member) const;
  // Ends that: the gradient becomes what the exchange has made of the placeholder, if anybody `used` the parameter.
  void resolve_placeholder(size_t member, bool used);

  // --- Gradients to the wire, and back

  // All members that are not packed yet, by one kernel, scaled by `scale`; a parameter without a gradient contributes zeros. A
  // gradient that is in the wire already, and has to be scaled by 1, is left alone: if all are, there is no kernel. Runs on the
  // current stream, after all producers.
  void pack(double scale);
  // The same as soon as a member's gradient is there, for that one or for all that have come, where that pays (note [When to
  // pack], kernels.h).
  void pack_on_arrival(size_t member, double scale);
  // All members whose gradient is not in the wire, by one kernel, which also measures the gradients if it writes all of them.
  // `result` is the wire or a tensor laid out like it. Runs on the current stream.
  void unpack(const at::Tensor& result);

  // --- What gradients are, before and after ranks have added them up (measuring.cpp)

  // Measures the gradients of these members into `local_sums`, if it is there and has not got them: for what reads gradients
  // without pack(). On the current stream, which has waited for them.
  void measure_local(const std::vector<size_t>& members);
  // Those of all members, after all producers.
  void measure_local();
  // Says that `slots` are about to be packed: what their kernel is to leave its sums in, or null.
  LocalSums* sums_of_packed(const std::vector<Slot>& slots);
  // Averaged gradients become something else than what the exchange wrote.
  void note_rewritten();
  // What `BucketWindow::measured` is, read from the wire by one kernel if unpack has not seen all gradients. Runs on the current
  // stream.
  const std::vector<at::Tensor>& measure();
  // The same where there is no wire: read from each gradient.
  const std::vector<at::Tensor>& measure_gradients();

  // --- Between two windows

  // The members whose gradients live in the wire with no hand on it but the parameters': they may move to another one.
  std::vector<size_t> movable_members() const;
  // Moves the member's gradient into the wire, as it is, if a gradient can live there.
  void move_in(size_t member);
  // Zeroes the wire, and so the gradients that live in it: those of a window that failed are void, and a collective may have
  // written to them after the caller set them to zero.
  void zero_wire();

 private:
  void check_gradient(size_t member, const at::Tensor& gradient) const;
  bool somebody_holds_wire() const;
  void leave_wire_to_holders();
  void pack_members(const std::vector<size_t>& members, double scale);
  void place_gradient(size_t member, bool lived_in_wire);
  bool pack_frees() const { return layout.form().as_bucket_view && wire.is_home(); }

  std::vector<at::Tensor> holders_;
};

}  // namespace fastddp
