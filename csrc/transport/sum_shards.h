// The sum of the shards that each rank sent of one part of a wire.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device/compiled_kernels.h"

namespace fastddp {

// target = 0 plus the shards, fp16 or bf16, [elements] each, added up in fp32 in their order and rounded once. On the CPU.
// `target` may be one of the shards.
void sum_shards(const std::vector<at::Tensor>& shards, const at::Tensor& target);
// The same for the rows of [ranks, elements], on any device. On a GPU the kernel of kernels/sum_shards_kernels.py does it if it
// is loaded, else torch's operators.
void sum_shards(const at::Tensor& shards, const at::Tensor& target, Purpose purpose = Purpose::training);
// The same by torch's operators: in the kernel's order, so that the bits are the same.
void sum_shards_with_operators(const at::Tensor& shards, const at::Tensor& target);

}  // namespace fastddp
