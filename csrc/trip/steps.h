// What stages do with gradients: to a wire, from one wire to the next, and back.
#pragma once

#include "trip/stage.h"

namespace fastddp {

// 0 to count - 1.
std::vector<size_t> first_numbers(size_t count);

// Spans of all members of a bucket.
Spans spans_of(const Bucket& bucket);
// The part of the bucket's wire that has all spans of a run: where it begins, and how long it is, in multiples of `unit`.
std::pair<int64_t, int64_t> extent_of_run(const Travel& travel, const Sharding& sharding, int64_t unit);

// encode() of the first leg: of these members, whose gradients have come.
void encode_members(Travel& travel, Codec& codec, Numbers members);
// The same when all have come, of those that are left.
at::Tensor encode_rest(Travel& travel, Codec& codec);
// encode() of any leg of all spans.
at::Tensor encode_all(Travel& travel, Codec& codec, size_t leg, double scale);

// Writes the bucket's gradients from the sum of the last leg, or of its own wire.
void decode(Travel& travel, Codec& codec);
// The same for this rank's part of them.
void decode_mine(Travel& travel, Codec& codec);

// Two levels: the spans' gradients are parts of this rank's run of `wire`, which has the node's sums.
void bind_run(Travel& travel, const Sharding& sharding, int64_t unit, const at::Tensor& wire);
// Writes the run from the sum of the last leg.
void decode_run(Travel& travel, Codec& codec);
// In its place, if the window has failed.
void recover_run(Travel& travel, Codec& codec);

}  // namespace fastddp
