#include "device/memory_part.h"

#include <ATen/ops/from_blob.h>

namespace fastddp {
namespace {

void let_memory_go(void* memory) {
  delete static_cast<c10::Storage*>(memory);
}

}  // namespace

at::Tensor part_of(const c10::Storage& memory, int64_t first_byte, int64_t elements, const at::TensorOptions& options) {
  auto* const begin = static_cast<std::byte*>(memory.mutable_data()) + first_byte;
  return at::for_blob(begin, {elements})
      .context(new c10::Storage(memory), &let_memory_go)
      .target_device(memory.device())
      .options(options)
      .make_tensor();
}

const c10::DataPtr& allocated(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  if (data.get_deleter() != &let_memory_go) return data;
  return static_cast<const c10::Storage*>(data.get_context())->data_ptr();
}

}  // namespace fastddp
