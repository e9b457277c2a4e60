// A bucket: the gradients that travel together, and the wire in which they may live.
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

class Shard;

// Note [Where gradients live]
// With gradient_as_bucket_view, `parameter.grad` has its place in the wire. It stays the same tensor, and every window overwrites
// it: torch's contract. It is none of the wire's parts, which would follow if somebody gave it other memory (`grad.data = ...`).
//
// Without it, a gradient's values belong to whoever holds the gradient. They need not be copied for that:
// - A gradient that only its parameter refers to gets the wire's memory when it has been packed. This saves the unpack kernel,
//   and autograd's memory is free for the next gradient while it is still in cache.
// - A gradient that someone else refers to stays where it is, and unpack writes the average there.
// - If someone keeps a gradient in the wire's memory beyond the next window, the wire is theirs. The bucket takes a new one.
//
// Note [All or nothing]
// A way of gradients, and buckets for it, take memory, Python and other ranks, and each of these may raise. So what follows from a way
// is made beside what is in force (Driver::prepare(), Buckets::others()), and takes its place at the end, where nothing raises any
// more. Whoever catches the error has the exchange of before.

// What of a bucket follows from a way.
struct Outline {
  Layout layout;
  std::optional<Wire::Need> wire;  // none: something else travels
  std::shared_ptr<Shard> shard;    // as Bucket::shard
  bool keeps_wire = true;          // members are where they were, so the wire stays if it is as long

  void set_grid(Grid grid) { keeps_wire = !layout.set_grid(grid) && keeps_wire; }
  // How the wire is laid out and where its memory comes from (wire_memory.h). `has_beside`: as Wire::Need.
  void set_wire(WireFormat format, WireMemory memory = nullptr, bool has_beside = false);
  // Something else travels, as numbers of this format, or nothing does. Gradients stay where autograd put them.
  void do_without_wire(WireFormat format);
  // Note [Lent wires], wire.h: what travels has memory during a window only.
  bool lends_wire() const { return layout.form().lazy_bucket_allocation && (shard != nullptr || !wire); }
};

// What is done with a bucket is in files of their own: packing.h, placeholders.h, measuring.h.
class Bucket {
 public:
  // `holders`: by member, the tensor whose .grad() is the gradient: the parameter or another tensor; note [Main gradients].
  Bucket(Layout layout, std::vector<at::Tensor> holders);

  Layout layout;
  // In which gradients live while they travel as they are; its parts are the members' views. Not planned: something else travels.
  Wire wire;
  BucketWindow window;  // the state of the current window
  // Measures of this rank's gradients in the last window, if somebody wants them; note [Local sums], pack/local_sums.h.
  std::optional<LocalSums> local_sums;
  std::unique_ptr<Kernels> kernels;
  // Null: this rank gets all averages. Note [Sharded gradients], shard.h.
  std::shared_ptr<Shard> shard;
  // By member: note [What a gradient still holds], gradient_mark.h. Marks outlive windows.
  std::vector<GradientMark> marks;

  size_t index() const { return layout.index(); }
  size_t size() const { return layout.size(); }
  c10::Device device() const { return layout.device(); }
  // As Outline::lends_wire().
  bool lends_wire() const { return layout.form().lazy_bucket_allocation && (shard != nullptr || !wire.is_planned()); }

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
  // The gradient, to be written. Makes memory where there is none, and gives autograd a new version.
  at::Tensor& gradient_to_write(size_t member);

  // What it is now, to be changed for a coming way.
  Outline outline() const { return {layout, wire.need(), shard}; }
  // From the next window on. Raises nothing.
  void take(Outline outline);
  // Makes the wire, which does not exist.
  void make_wire();
  // Leaves the wire to whoever holds it.
  void take_another_wire();

  // The member's gradient is final. `exclusive`: nobody but the parameter refers to its memory.
  void arrive(size_t member, bool exclusive);

 private:
  std::vector<at::Tensor> cut_up(const at::Tensor& wire) const;

  std::vector<at::Tensor> holders_;
};

// Raises if it is no gradient of the member.
void check_gradient(const Bucket& bucket, size_t member, const at::Tensor& gradient);

}  // namespace fastddp
