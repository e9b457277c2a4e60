// Steps: what the stages of a trip do with gradients. Their types are those of Stage and Trip (stage.h).
#pragma once

#include "trip/stage.h"

namespace fastddp {

// 0 to count - 1.
std::vector<size_t> first_numbers(size_t count);

// --- From gradients to a wire: when all of a bucket have come, and on the arrival of one, where that pays

// To the bucket's own wire.
at::Tensor pack_own(const Way&, Travel& travel);
void pack_own_on_arrival(const Way&, Travel& travel, size_t member);
// As the codec says, to the first leg's wire, or to the bucket's own where there are no legs.
at::Tensor encode(const Way& way, Travel& travel);
void encode_on_arrival(const Way& way, Travel& travel, size_t member);
// Nothing travels: only measures gradients.
at::Tensor measure_all(const Way&, Travel& travel);
void measure_on_arrival(const Way&, Travel& travel, size_t member);

// --- From one wire to the next

// To the second leg's, from the sum of the first.
at::Tensor encode_again(const Way& way, Travel& travel);
// Two levels: to that of this rank's run, from the node's sums of it.
at::Tensor encode_run(const Way& way, Travel& travel);
// And back.
at::Tensor decode_run(const Way& way, Travel& travel);

// --- Back to gradients

// From the sum of the last leg, or of the bucket's own wire.
void decode(const Way& way, Travel& travel);
// From the bucket's own wire, which has the results of its runs.
void unpack_own(const Way&, Travel& travel);
// To this rank's part of the gradients: as decode(), and from its run.
void decode_mine(const Way& way, Travel& travel);
void decode_run_of_mine(const Way& way, Travel& travel);
// What a hook has left.
void unpack_result(const Way&, Travel& travel);
void leave(const Way&, Travel&);

// --- In a window that fails: what travels in place of a wire that is not the codec's, and what follows

at::Tensor void_own(const Way&, Travel& travel, double value);
// Zeros, if other nodes would remember anything else: note [Two levels of a window that fails], way.h.
at::Tensor void_to_node(const Way& way, Travel& travel, double value);
at::Tensor void_run(const Way&, Travel& travel, double value);
at::Tensor void_hook(const Way& way, Travel& travel, double);
void recover(const Way& way, Travel& travel);
void recover_run(const Way& way, Travel& travel);

}  // namespace fastddp
