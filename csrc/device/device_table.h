// A table of numbers for kernels. It is kept on the device, and sent there from pinned memory when it has changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <vector>

#include "device/cuda_driver.h"

namespace fastddp {

using Words = std::vector<int64_t>;

class DeviceTable {
 public:
  DeviceTable(c10::Device device, const CudaDriver& driver) : device_(device), driver_(driver) {}

  // The table on the device, in the order of the current stream. `words` makes it from what `key` decides, and is called when
  // `key` is neither of the last two, or in a capture: nothing is uploaded in a steady state, also where two buffers change
  // places in each step. Without `words`, the key is the table.
  const at::Tensor& refresh(Words key, const std::function<Words()>& words = {});

  size_t uploads() const { return uploads_; }

 private:
  c10::Device device_;
  const CudaDriver& driver_;
  struct Sent {
    Words key;
    at::Tensor on_device;
  };
  std::array<Sent, 2> sent_;  // the last one first
  at::Tensor of_capture_;
  size_t uploads_ = 0;
};

}  // namespace fastddp
