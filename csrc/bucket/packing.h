// Gradients to a bucket's wire, and back; and where they live in between: note [Where gradients live], bucket.h.
#pragma once

#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// The members that are not packed yet, and for which `which`, if any, is true.
std::vector<size_t> not_packed(const Bucket& bucket, bool MemberState::* which = nullptr);
// Packs these members, by one kernel, scaled by `scale`. A parameter without a gradient contributes zeros. A gradient that is in the
// wire already needs no kernel if `scale` is 1. Runs on the current stream, which waits for all gradients that have come. Returns
// the wire.
const at::Tensor& pack(Bucket& bucket, const std::vector<size_t>& members, double scale);
// Packs on arrival where that pays: this member, or all that have come (note [When to pack], pack/kernels.h).
void pack_on_arrival(Bucket& bucket, size_t member, double scale);
// Unpacks all members whose gradient is not in the wire, by one kernel. It also measures the gradients if it writes all of them.
// `result` is the wire or a tensor laid out like it. Runs on the current stream.
void unpack(Bucket& bucket, const at::Tensor& result);

// Keeps this memory, of what travels, for the current stream, which is a side stream.
void note_use_of_wire(Bucket& bucket, const at::Tensor& wire);

// --- Between two packs

// If somebody kept a gradient of an earlier window that lives in the wire, leaves the wire to them and takes a new one.
void leave_wire_to_holders(Bucket& bucket);
// Moves the gradient out of the wire, if it lives there, into memory of its own.
void leave_wire(Bucket& bucket, size_t member);

// Of a failed window: gradients that would have moved into the wire get memory of their own, with zeros. What they have may be another
// gradient, too (note [Handed over], autograd/grad_hooks.h).
void leave_shared_memory(Bucket& bucket);

// Between the microbatches of a window: moves the gradient into the wire, if it may live there. The next microbatch is added to it
// there. It must be `exclusive`, except with gradient_as_bucket_view and for main gradients. Note [Main gradients].
void settle(Bucket& bucket, size_t member, bool exclusive);
// Adds `parameter.grad`, if there is one, to the main gradient, and frees it.
void add_to_main(Bucket& bucket, size_t member);
// Moves the main gradient into the wire, if it may live there. A new main gradient is zero.
void place_main(Bucket& bucket, size_t member);

// Between two windows: the members whose gradients live in the wire and may move to another one. None, if anybody but parameters
// refers to the wire.
std::vector<size_t> movable_members(const Bucket& bucket);
// Moves the member's gradient and its values into the wire, if gradients can live there.
void move_in(Bucket& bucket, size_t member);
// Zeroes the wire, and so the gradients that live there. Gradients of a failed window are void: a collective may have written to
// them after the caller set them to zero.
void zero_wire(Bucket& bucket);

}  // namespace fastddp
