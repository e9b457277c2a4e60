#include "device/huge_pages.h"

#include <ATen/ops/empty.h>
#include <sys/mman.h>

namespace fastddp {

at::Tensor empty_in_huge_pages(int64_t elements, const at::TensorOptions& options) {
  auto memory = at::empty({elements}, options);
  if (!memory.is_cpu()) return memory;
  const auto address = reinterpret_cast<intptr_t>(memory.const_data_ptr());
  const auto begin = first_huge_page(address), end = (address + static_cast<intptr_t>(memory.nbytes())) / kHugePage * kHugePage;
  // Fails in a kernel without huge pages.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
  return memory;
}

}  // namespace fastddp
