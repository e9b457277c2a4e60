// Memory for what kernels write beside gradients, wires and factors: partial sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device/compiled_kernels.h"

namespace fastddp {

// In a trial such memory is NaN before a launch, so that a number which a kernel leaves out shows. There is other memory around
// it, which shows whether a kernel has written there.
class Scratch {
 public:
  Scratch(c10::Device device, Purpose purpose) : device_(device), purpose_(purpose) {}

  at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype);

  // Where a launch writes what belongs into `rows`, contiguous or undefined: there, except in a trial. After the launch,
  // move() brings it there.
  at::Tensor instead_of(const at::Tensor& rows);
  static void move(const at::Tensor& written, const at::Tensor& rows);

  // Whether a kernel has written around such memory. The host waits for the device.
  bool wrote_around() const;

 private:
  static constexpr double kAround = 7.0;

  c10::Device device_;
  Purpose purpose_;
  std::vector<at::Tensor> around_;
};

}  // namespace fastddp
