// Sums of squares, and counts of what is not finite, of gradients before and after ranks have added them up.
#pragma once

#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// --- Before: into Bucket::local_sums, if it is there

// Measures these members' gradients, unless they are measured already. For gradients that pack() does not read. The current stream
// has waited for them.
void measure_local(Bucket& bucket, Numbers members);
// `slots` are about to be packed. Returns where their kernel leaves its sums.
LocalSums* sums_of_packed(Bucket& bucket, const std::vector<Slot>& slots);

// --- After

// Partial results of all averaged gradients. What nobody has seen is read on the current stream.
const std::vector<at::Tensor>& measure(Bucket& bucket);
// Whether kernels on the host have seen numbers that are not finite.
bool has_seen_not_finite(const Bucket& bucket);

}  // namespace fastddp
