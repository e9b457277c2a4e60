// Gradients in the order of their parameters' memory, for codecs that read them as rows of numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "bucket/bucket.h"

namespace fastddp {

// Of one bucket, in one window. A gradient that lies otherwise, or has another dtype, is a copy for that long.
class FlatGradients {
 public:
  // [elements] of `dtype`; complex numbers are pairs. A parameter without a gradient gets one, of zeros.
  at::Tensor of(Bucket& bucket, size_t member, c10::ScalarType dtype);

  // What was written to copies goes to the gradients.
  void write_back() const;

  // What a side stream has used beside the gradients themselves.
  std::vector<at::Tensor> copies() const;

  void let_go() { copies_.clear(); }

 private:
  struct Copy {
    at::Tensor gradient;
    at::Tensor copy;  // like it, in the memory of what of() has returned
  };
  std::vector<Copy> copies_;
};

}  // namespace fastddp
