// The sum of what each rank sent of one part of a wire.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// The sum of the rows of `shards`, fp16 or bf16, [ranks, elements], added up in fp32 in the order of ranks and rounded once.
// Written to each row of `copies`, a tensor like `shards` (or [1, elements]); the two may be the same.
void sum_shards(const at::Tensor& shards, const at::Tensor& copies);

}  // namespace fastddp
