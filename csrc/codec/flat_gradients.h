// Gradients in the order of their parameters' memory, for codecs that read them as rows of numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// The gradients of one bucket, for one window. A gradient with another memory order or dtype is copied.
class FlatGradients {
 public:
  // [elements] of `dtype`; complex numbers are pairs. A parameter without a gradient gets a gradient of zeros.
  at::Tensor of(Bucket& bucket, size_t member, c10::ScalarType dtype);

  // Writes the copies to their gradients.
  void write_back() const {
    for (const auto& [gradient, copy] : copies_) gradient.copy_(copy);
  }

  // The copies, which a side stream uses as well as the gradients.
  std::vector<at::Tensor> copies() const {
    std::vector<at::Tensor> tensors;
    for (const auto& copy : copies_) tensors.push_back(copy.copy);
    return tensors;
  }

  void let_go() { copies_.clear(); }

 private:
  struct Copy {
    at::Tensor gradient;
    at::Tensor copy;  // like the parameter, in the memory that of() returned
  };
  std::vector<Copy> copies_;
};

}  // namespace fastddp
