// A tensor's memory without the tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "guard.h"

namespace fake_cuda {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A CPU tensor with the elements of `tensor`. It does not keep the memory: what is enqueued may capture it and holds
// nothing, as a kernel holds nothing.
inline at::Tensor host_view(const at::Tensor& tensor) {
  auto* address = tensor.numel() == 0 ? nullptr : const_cast<void*>(tensor.const_data_ptr());
  auto view = at::from_blob(address, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

}  // namespace fake_cuda
