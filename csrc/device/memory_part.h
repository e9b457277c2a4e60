// Several tensors in one piece of memory, each with a storage of its own.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// Who else refers to a tensor shows in the references to its storage, so tensors of different owners cannot share one. A part
// keeps the memory, of which it is a run of elements; not initialised.
at::Tensor part_of(const c10::Storage& memory, int64_t first_byte, int64_t elements, const at::TensorOptions& options);

// What the allocator knows: of a part, the whole memory.
const c10::DataPtr& allocated(const c10::Storage& storage);

}  // namespace fastddp
