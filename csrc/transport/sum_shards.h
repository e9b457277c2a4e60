// The sum of what each rank sent of one part of a wire.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

// The sum of the shards, fp16 or bf16, [elements] each, added up in fp32 in their order and rounded once. `target` may be
// one of them.
void sum_shards(const std::vector<at::Tensor>& shards, const at::Tensor& target);
// The same of the rows of [ranks, elements].
void sum_shards(const at::Tensor& shards, const at::Tensor& target);

}  // namespace fastddp
