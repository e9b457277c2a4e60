// Long tensors of the host in huge pages.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastddp {

// Note [Huge pages]
// A wire, or the flat memory of parameters, is read and written from one end to the other, by this process and, note [Reads]
// (transport/reads.h), by others. With pages of 2 MiB in place of 4 KiB there are fewer to look up, and a read by another process,
// which looks up each page, takes half the time. Linux gives such pages to memory that asks for them before it is written.

constexpr int64_t kHugePage = 2 << 20;

// At this address, or the next one.
inline intptr_t first_huge_page(intptr_t address) {
  return (address + kHugePage - 1) / kHugePage * kHugePage;
}

// One-dimensional, not initialised. Only pages that lie entirely inside it are huge.
at::Tensor empty_in_huge_pages(int64_t elements, const at::TensorOptions& options);

}  // namespace fastddp
