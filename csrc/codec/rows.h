// Gradients of spans as rows of numbers, in the order of their parameters' memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "bucket/spans.h"

namespace fastddp {

// For one call of a codec. A gradient with another memory order or dtype is copied.
class Rows {
 public:
  // [elements] of `dtype`; complex numbers are pairs. `is_read`: it has the gradient's numbers, or zeros where there is none. If not,
  // it is written, and write_back() follows.
  at::Tensor of(const Span& span, c10::ScalarType dtype, bool is_read);
  void write_back() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // gradient, and a tensor like it in the row's memory
};

}  // namespace fastddp
