// Sparse gradients (of an Embedding with sparse=True): how they travel.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <vector>

namespace fastddp {

// A gradient of `parameter` that adds nothing.
at::Tensor gradient_without_rows(const at::Tensor& parameter);

// Each gradient becomes the sum over ranks of the gradients times `scale`, coalesced; with nothing on any rank it stays
// undefined. Ranks hand in gradients of the same parameters, in the same order, of shapes like these; an undefined one
// contributes nothing, or, of a window that `is_void`, makes the sum NaN. Rows of all ranks are gathered, which needs their
// numbers first: the host waits for those. Waits for everything, on the current stream where it can.
void sum_sparse_gradients(c10d::ProcessGroup& group, std::vector<at::Tensor>& gradients,
                          const std::vector<at::Tensor>& parameters, double scale, bool is_void);

}  // namespace fastddp
