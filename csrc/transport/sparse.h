// How sparse gradients (of an Embedding with sparse=True) travel.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace fastddp {

// A gradient of `parameter` without rows, which adds nothing to a sum.
at::Tensor gradient_without_rows(const at::Tensor& parameter);

// Each gradient becomes the sum over ranks of the gradients times `scale`, coalesced. It is left as it is if no rank has a row.
// All ranks pass gradients of the same parameters in the same order. An undefined gradient adds nothing, but with `is_void` (the
// window failed) it makes the sum NaN. The host waits for the ranks' numbers of rows, then all rows are gathered. Waits for
// everything, on the current stream where it can.
void sum_sparse_gradients(c10d::ProcessGroup& group, std::vector<at::Tensor>& gradients,
                          const std::vector<at::Tensor>& parameters, double scale, bool is_void);

}  // namespace fastddp
