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
  // [elements] of `dtype`; complex numbers are pairs. A span without a gradient has zeros.
  at::Tensor to_read(const Span& span, c10::ScalarType dtype);
  // The same memory to write to, with any numbers in it; write_back() follows.
  at::Tensor to_write(const Span& span, c10::ScalarType dtype);
  void write_back() const {
    for (const auto& [gradient, copy] : copies_) gradient.copy_(copy);
  }

 private:
  at::Tensor row_of(const Span& span, c10::ScalarType dtype);

  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // gradient, and a tensor like it in the row's memory
};

}  // namespace fastddp
