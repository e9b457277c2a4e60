// A bucket: the gradients that travel together, and the wire they travel on.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket/gradient_memory.h"
#include "bucket/wire_memory.h"
#include "device/streams.h"
#include "pack/kernels.h"

namespace fastddp {

// Note [Where gradients live]
// With gradient_as_bucket_view, `parameter.grad` is a view of the wire. It is always the same view, and every window
// overwrites it: this is torch's contract for the option.
//
// Without it, a gradient's values belong to whoever holds the gradient. They need not be copied for that:
// - A gradient that only its parameter refers to gets the wire's memory when it has been packed. This saves the unpack kernel,
//   and autograd's memory is free for the next gradient.
// - A gradient that someone else refers to stays where it is, and unpack writes the average there.
// - If someone keeps a gradient in the wire's memory beyond the next window, the wire is theirs. The bucket takes a new one.
// Note [Aligned members]
// The kernels of a GPU move 16 bytes at once where both ends of a run begin at a multiple of 16 bytes, and single elements
// elsewhere. One bias of 10 elements would put everything behind it on the slow path. So in the wires of fastddp's own
// exchanges each member begins at a multiple of 16 bytes. The gaps between members are zero when the wire is made. Pack does
// not write them, and sums of zeros are zero, so whoever reads a whole wire reads gradients and zeros. A hook written for
// torch's DDP takes the buffer for gradients one behind the other, and so does batched PowerSGD: their wires have no gaps.
//
// Note [Lent wires]
// A wire in which no gradients live is of use during a window only. With `lends_wires` (lazy_bucket_allocation) such wires are
// taken when a window needs them, and given back when it has ended: to the allocator, which has their memory for the forward and
// the optimizer. The caller's stream has waited for all that used them (note [Kept until the join], device/streams.h), so it can
// be given out again on that stream at once, however far the device lags behind.
// A captured graph is replayed on the memory that it was captured with. So an exchange of which a window was captured keeps its
// wires from then on.
enum class Placing { without_gaps, aligned };

struct Bucket {
  // Bucket `index` of `count`: the gradients of `members` one behind the other. Members are indices into `all_parameters`,
  // `all_holders` and `all_names`.
  Bucket(size_t index, size_t count, std::vector<size_t> members, const std::vector<at::Tensor>& all_parameters,
         const std::vector<at::Tensor>& all_holders, const std::vector<std::string>& all_names, GradientForm form);

  size_t index;                        // its place in the order of collectives
  size_t count;                        // of buckets in the plan
  std::vector<size_t> members;         // the parameters' indices in the reducer
  std::vector<at::Tensor> parameters;  // the parameters themselves
  std::vector<at::Tensor> holders;     // whose .grad() is the gradient: these, or others; note [Main gradients]
  std::vector<std::string> names;      // and what the user calls them
  GradientForm form;                   // alike for all buckets

  // Each gradient's elements in the wire, in the form that c10d::GradBucket takes; complex numbers are pairs of elements.
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<std::vector<int64_t>> sizes;

  // What travels: one-dimensional, padded with zeros to a multiple of `wire_unit` elements, made when a window first needs
  // it.
  at::Tensor wire;
  WireMemory memory;           // where it comes from
  c10::ScalarType wire_dtype;  // real; that of the gradients unless the exchange casts
  int64_t wire_unit = 1;
  Placing placing = Placing::without_gaps;
  bool wire_is_home = true;  // it travels, and has the gradients' dtype: they may live there
  bool is_settled = false;   // some of this window moved there before they travel; settle()
  // Each gradient's elements in it as a tensor like the parameter, with its strides if it is dense.
  std::vector<at::Tensor> views;
  // All tensors besides `views` that have the wire's memory for as long as it is this bucket's: the parts in which it travels,
  // say. A process group may hold what it has sent for a while, and what it holds then is nothing new.
  std::vector<at::Tensor> pieces;

  // Of the last window: partial sums of squares of its gradients and counts of those that are not finite, each [..., 2];
  // empty where no kernel came by all of them.
  std::vector<at::Tensor> measured;

  // Of the last window, where somebody wants to know: what this rank's gradients were; note [Local sums], pack/local_sums.h.
  std::optional<LocalSums> local_sums;

  // The window: what has come, by member.
  struct Gradient {
    bool final = false;            // it will not change any more before it is packed
    bool has_placeholder = false;  // `placeholder` travels in its place
    bool was_empty = false;        // there was no gradient when that began
    bool may_be_dropped = false;   // what travels, if no rank has used the parameter
    bool exclusive = false;        // nobody but the parameter refers to it
    bool packed = false;           // it is in the wire
    bool in_wire = false;          // it is the wire's memory: there is nothing to unpack
    bool measured = false;         // `local_sums` has it
    at::Tensor placeholder;
    at::Tensor unexpected;  // what came for it since then
  };
  std::vector<Gradient> gradients;
  size_t packs = 0;            // calls of a kernel that packs, up to now
  size_t measurings = 0;       // and of one that measures gradients
  size_t beside = 0;           // bytes of final gradients that are not packed and have memory beside the wire
  bool left_in_place = false;  // gradients stay where they are, whole, until backward has ended: reduction.h
  bool rewritten = false;      // what `measured` saw is not what the gradients became
  Producers producers;         // the streams on which gradients came
  KeptUntilJoin kept;          // gradients that the side stream uses

  // Note [Placeholders]
  // A parameter that this rank does not use travels too, because another rank may use it. What is sent is what
  // `parameter.grad` holds, or zeros. Only the end of the window tells whether any rank used the parameter. Until then an
  // unexpected gradient may come, and if no rank used it, `parameter.grad` must stay as it is. So pack reads a placeholder, and
  // the exchange writes it. At the end it replaces the gradient, or is dropped.
  at::Tensor& gradient(size_t member);
  const at::Tensor& gradient(size_t member) const;

  std::unique_ptr<Kernels> kernels;

  c10::Device device() const;
  // Real; complex numbers are pairs. All members have the same.
  c10::ScalarType gradient_dtype() const;
  // Of the gradients, padding not counted; complex numbers are pairs.
  int64_t elements() const;
  // Note [Lent wires]: what travels is there during a window only.
  bool lends_wire() const { return form.lends_wires && !wire_is_home; }
  // From the wire's begin to the end of its last member.
  int64_t extent() const;
  // Begins a window.
  void reset();
};

// Says what the wire has to be from the next window on. A cast wire is never where gradients live: they stay where
// autograd put them.
void set_wire_format(Bucket& bucket, c10::ScalarType dtype, Placing placing, int64_t unit = 1);

// Takes memory for it.
void make_wire(Bucket& bucket);
// Takes this memory, in which gaps are zero: a part of another bucket's wire.
void use_wire(Bucket& bucket, const at::Tensor& wire);
// The current stream, a side stream, uses the memory of what travels.
void note_use_of_wire(Bucket& bucket, const at::Tensor& wire);

// Gives its memory back; gradients that live there keep it.
void drop_wire(Bucket& bucket);
// The same, and none will be made for gradients to live in: something else travels, or nothing.
void do_without_wire(Bucket& bucket);

// Fresh memory for the member's gradient.
at::Tensor empty_gradient(const Bucket& bucket, size_t member);

// Between the microbatches of a window: the gradient moves into the wire, if it may live there and nobody else has a hand on
// it, and the next one is added to it there. Note [Main gradients].
void settle(Bucket& bucket, size_t member, bool exclusive);
// Takes what autograd has left in `parameter.grad` to the main gradient; it has to be there.
void add_to_main(Bucket& bucket, size_t member);
// The main gradient is in the wire, if it may live there; the first time it is zero.
void place_main(Bucket& bucket, size_t member);

// Its elements.
int64_t wire_length(const Bucket& bucket);
// A tensor like the wire.
at::Tensor empty_wire(const Bucket& bucket);
// Fills one like it: `value` in place of every gradient, and zeros between them.
void fill_wire(const Bucket& bucket, const at::Tensor& wire, double value);

// Notes that the member's gradient is final. `exclusive`: nobody but the parameter has a hand on its memory.
void arrive(Bucket& bucket, size_t member, bool exclusive);

// Gives the member's gradient memory of its own, if it lives in the wire.
void leave_wire(Bucket& bucket, size_t member);

// From now on a placeholder travels in place of the member's gradient; zeros, unless what that holds `counts`.
void use_placeholder(Bucket& bucket, size_t member, bool counts);
// Of those for which `which(member)` says so and for which none travels yet.
template <typename Which, typename Counts>
void use_placeholders(Bucket& bucket, const Which& which, const Counts& counts) {
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    if (bucket.gradients[member].has_placeholder || !which(member)) continue;
    use_placeholder(bucket, member, counts(bucket.members[member]));
  }
}

// Notes that gradients become something else than what the exchange wrote.
void note_rewritten(Bucket& bucket);

// A gradient came all the same: autograd has added `incoming` to what the parameter had.
void note_unexpected(Bucket& bucket, size_t member, const at::Tensor& incoming);

// What the placeholder has left out; undefined: nothing.
at::Tensor left_out(const Bucket& bucket, size_t member);

// Ends that: the gradient becomes what the exchange has made of the placeholder, if anybody `used` the parameter.
void resolve_placeholder(Bucket& bucket, size_t member, bool used);

// Makes the current stream wait for all gradients that have come.
void wait_for_gradients(const Bucket& bucket);

// Gradient -> wire for all members that are not packed yet: one kernel, scaled by `scale`; a parameter without a gradient
// contributes zeros. A gradient that is in the wire already, and has to be scaled by 1, is left alone: if all are, there
// is no kernel. Runs on the current stream, after all producers.
void pack(Bucket& bucket, double scale);

// The same as soon as a member's gradient is there, for that one or for all that have come, where that pays (note [When to
// pack], kernels.h).
void pack_on_arrival(Bucket& bucket, size_t member, double scale);

// Measures the gradients of these members into `local_sums`, if it is there and has not got them: for what reads gradients
// without pack(). On the current stream, which has waited for them.
void measure_local(Bucket& bucket, const std::vector<size_t>& members);
// Those of all members, after all producers.
void measure_local(Bucket& bucket);
// Says that `slots` are about to be packed: what their kernel is to leave its sums in, or null.
LocalSums* sums_of_packed(Bucket& bucket, const std::vector<Slot>& slots);

// Wire -> gradient for all members whose gradient is not in the wire: one kernel, which also measures the gradients if it
// writes all of them. `result` is the bucket's wire or a tensor laid out like it. Runs on the current stream.
void unpack(Bucket& bucket, const at::Tensor& result);

// What `measured` is, read from the wire by one kernel if unpack has not seen all gradients. Runs on the current stream.
const std::vector<at::Tensor>& measure(Bucket& bucket);
// The same where there is no wire: read from each gradient.
const std::vector<at::Tensor>& measure_gradients(Bucket& bucket);

// The members whose gradients live in the wire with no hand on it but the parameters': they may move to another one.
std::vector<size_t> movable_members(const Bucket& bucket);

// Moves the member's gradient into the wire, as it is, if a gradient can live there.
void move_in(Bucket& bucket, size_t member);

// Zeroes the wire, and so the gradients that live in it: those of a window that failed are void, and a collective may have
// written to them after the caller set them to zero.
void zero_wire(Bucket& bucket);

}  // namespace fastddp
