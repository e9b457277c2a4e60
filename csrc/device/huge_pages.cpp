#include "device/huge_pages.h"

#include <ATen/ops/empty.h>
#include <sys/mman.h>

namespace fastddp {

at::Tensor empty_in_huge_pages(int64_t elements, const at::TensorOptions& options) {
  constexpr uintptr_t page = 2 << 20;
  auto memory = at::empty({elements}, options);
  if (!memory.is_cpu() || memory.nbytes() < 2 * page) return memory;
  const auto address = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
  const auto begin = (address + page - 1) / page * page, end = (address + memory.nbytes()) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // fails in a kernel without huge pages
  return memory;
}

}  // namespace fastddp
