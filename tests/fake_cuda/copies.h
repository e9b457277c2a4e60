// Copies between the host and the device, and on the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace fake_cuda {

void copy(const at::Tensor& destination, const at::Tensor& source, bool non_blocking);

// Host to device, since the last reset.
size_t uploads();
size_t uploaded_bytes();
void reset_uploads();

}  // namespace fake_cuda
