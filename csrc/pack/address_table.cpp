#include "pack/address_table.h"

#include <algorithm>

namespace fastddp {
namespace {

constexpr int64_t kAddressWords = 2;  // in a row of the table of addresses

struct Dim {
  int64_t size;
  int64_t stride;  // in elements
};

// The gradient's dims in the wire's order, innermost first. Neighbours are merged where one stride continues the other.
std::vector<Dim> collapse(const at::Tensor& gradient, const at::Tensor& view) {
  std::vector<int64_t> order;
  for (int64_t dim = 0; dim < gradient.dim(); ++dim) {
    if (gradient.size(dim) > 1) order.push_back(dim);
  }
  std::ranges::sort(order, {}, [&](int64_t dim) { return view.stride(dim); });
  std::vector<Dim> dims;
  for (const auto dim : order) {
    const Dim next{gradient.size(dim), gradient.stride(dim)};
    if (!dims.empty() && next.stride == dims.back().size * dims.back().stride) {
      dims.back().size *= next.size;
    } else {
      dims.push_back(next);
    }
  }
  return dims;
}

// Whether two elements may share memory: false is certain.
bool may_overlap(std::vector<Dim> dims) {
  std::ranges::sort(dims, {}, &Dim::stride);
  int64_t extent = 1;
  for (const auto& dim : dims) {
    if (dim.stride < extent) return true;
    extent += dim.stride * (dim.size - 1);
  }
  return false;
}

}  // namespace

TableWords::TableWords(const std::vector<Slot>& slots, bool writable) {
  for (const auto& slot : slots) {
    if (!add(slot, writable)) rest_.push_back(slot);
  }
}

// Whether the kernels can move it.
bool TableWords::add(const Slot& slot, bool writable) {
  const auto& [gradient, view, member] = slot;
  const auto wire_dtype = c10::toRealValueType(view.scalar_type());
  if (wire_dtype_ != c10::ScalarType::Undefined && wire_dtype != wire_dtype_) return false;
  if (!view.is_non_overlapping_and_dense()) return false;
  const int64_t count = view.numel() * (view.is_complex() ? 2 : 1);
  Row row{0, -1, static_cast<const char*>(view.const_data_ptr()), count, member};
  if (gradient.defined()) {
    const auto dtype = c10::toRealValueType(gradient.scalar_type());
    if (gradient_dtype_ != c10::ScalarType::Undefined && dtype != gradient_dtype_) return false;
    if (gradient.is_complex() != view.is_complex() || gradient.device() != view.device()) return false;
    if (!same_dense_layout(gradient, view) && count > 0) {
      if (gradient.is_complex() || gradient.is_neg() || gradient.layout() != c10::kStrided) return false;
      const auto dims = collapse(gradient, view);
      if (writable && may_overlap(dims)) return false;
      // The gradient may be flat after all: strides of dims of size one do not matter.
      if (dims.size() != 1 || dims[0].stride != 1) {
        row.shape = static_cast<int64_t>(blocks_.size());
        blocks_.push_back(static_cast<int64_t>(dims.size()));
        for (const auto& dim : dims) blocks_.insert(blocks_.end(), {dim.size, dim.stride});
      }
    }
    gradient_dtype_ = dtype;
    row.address = reinterpret_cast<int64_t>(gradient.const_data_ptr());
  }
  wire_dtype_ = wire_dtype;
  if (count == 0) return true;
  if (wire_ == nullptr || row.target < wire_) wire_ = row.target;
  rows_.push_back(row);
  return true;
}

Words TableWords::addresses() const {
  const auto first_block = kAddressWords * static_cast<int64_t>(rows_.size());
  Words words;
  words.reserve(first_block + blocks_.size());
  for (const auto& row : rows_) words.insert(words.end(), {row.address, row.shape < 0 ? 0 : first_block + row.shape});
  words.insert(words.end(), blocks_.begin(), blocks_.end());
  return words;
}

Words TableWords::places() const {
  Words words;
  words.reserve(2 * rows_.size());
  for (const auto& row : rows_) words.insert(words.end(), {row.target - wire_, row.count});
  return words;
}

Words TableWords::chunks(int64_t chunk_elements) const {
  const auto element_size = static_cast<int64_t>(c10::elementSize(wire_dtype_));
  Words words;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto start = (rows_[i].target - wire_) / element_size;
    for (int64_t begin = 0; begin < rows_[i].count; begin += chunk_elements) {
      const auto count = std::min(chunk_elements, rows_[i].count - begin);
      words.insert(words.end(), {static_cast<int64_t>(i), begin, start + begin, count});
    }
  }
  return words;
}

std::vector<std::pair<size_t, int64_t>> TableWords::chunk_counts(int64_t chunk_elements) const {
  std::vector<std::pair<size_t, int64_t>> counts;
  for (const auto& row : rows_) counts.emplace_back(row.member, (row.count + chunk_elements - 1) / chunk_elements);
  return counts;
}

}  // namespace fastddp
