// Gradients to a bucket's wire, and back.
#pragma once

#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// Makes the current stream wait for all gradients of the bucket that have come.
void wait_for_gradients(const Bucket& bucket);

// Packs all members that are not packed yet, by one kernel, scaled by `scale`. A parameter without a gradient contributes zeros. A
// gradient that is in the wire already needs no kernel if `scale` is 1. Runs on the current stream, after all producers. Returns the
// wire.
const at::Tensor& pack(Bucket& bucket, double scale);
// Packs on arrival where that pays: this member, or all that have come (note [When to pack], pack/kernels.h).
void pack_on_arrival(Bucket& bucket, size_t member, double scale);
// Unpacks all members whose gradient is not in the wire, by one kernel. It also measures the gradients if it writes all of them.
// `result` is the wire or a tensor laid out like it. Runs on the current stream.
void unpack(Bucket& bucket, const at::Tensor& result);

// Keeps this memory, of what travels, for the current stream, which is a side stream.
void note_use_of_wire(Bucket& bucket, const at::Tensor& wire);

}  // namespace fastddp
