// The sum of what each rank sent of one part of a wire.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

// The sum of the shards, fp16 or bf16, [elements] each, added up in fp32 in their order, to 0, and rounded once. On the CPU.
// `target` may be one of them.
void sum_shards(const std::vector<at::Tensor>& shards, const at::Tensor& target);
// The same of the rows of [ranks, elements], on any device: on a GPU by the kernel of kernels/sum_shards_kernels.py, if it is
// loaded, and by torch's operators otherwise.
void sum_shards(const at::Tensor& shards, const at::Tensor& target);

}  // namespace fastddp
