// Several tensors in one piece of memory, each with a storage of its own.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// The references to a tensor's storage show who else refers to the tensor. So tensors of different owners cannot share a storage.
// A part is `elements` elements of `memory`, not initialised, and keeps the memory.
at::Tensor part_of(const c10::Storage& memory, int64_t first_byte, int64_t elements, const at::TensorOptions& options);

// The memory that the allocator knows. For a part, that is the whole memory.
const c10::DataPtr& allocated(const c10::Storage& storage);

}  // namespace fastddp
