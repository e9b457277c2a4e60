#include "transport/registered_memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "bucket/spans.h"
#include "device/cuda_driver.h"
#include "device/memory_part.h"
#include "device/streams.h"

namespace fastddp {
namespace {

constexpr int64_t kAlignment = 512;  // bytes, as CUDA's allocators align

}  // namespace

struct Slabs::Slab {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::Device device;
  struct Place {
    int64_t next;  // byte
    int64_t end;
  };
  std::vector<Place> places;
  c10::Storage memory;  // null: the group has none
  Producers given_out;  // the stream on which it was allocated

  int64_t bytes() const { return places.empty() ? 0 : places.back().end; }

  at::Tensor make(size_t number, int64_t elements, const at::TensorOptions& options) {
    auto& [next, end] = places[number];
    const auto bytes = Slabs::bytes(elements, options.dtype().toScalarType());
    if (!memory || next + bytes > end) return at::empty({elements}, options);
    given_out.current_stream_waits(device);
    const auto begin = std::exchange(next, next + bytes);
    return part_of(memory, begin, elements, options);
  }
};

int64_t Slabs::bytes(int64_t elements, c10::ScalarType dtype) {
  return rounded_up(elements * static_cast<int64_t>(c10::elementSize(dtype)), kAlignment);
}

const std::shared_ptr<Slabs::Slab>& Slabs::of(c10d::ProcessGroup& group, c10::Device device) {
  const auto is_of = [&](const auto& slab) { return slab->group.get() == &group && slab->device == device; };
  const auto found = std::ranges::find_if(slabs_, is_of);
  if (found != slabs_.end()) return *found;
  const auto held = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group);
  return slabs_.emplace_back(std::make_shared<Slab>(Slab{held, device, {}, {}, {}}));
}

WireMemory Slabs::reserve(c10d::ProcessGroup& group, c10::Device device, int64_t bytes) {
  if (bytes == 0 || group.getSize() == 1 || is_capturing(device)) return nullptr;
  const auto& slab = of(group, device);
  const auto begin = slab->bytes();
  slab->places.push_back({begin, begin + bytes});
  return [slab, number = slab->places.size() - 1](int64_t elements, const at::TensorOptions& options) {
    return slab->make(number, elements, options);
  };
}

void Slabs::allocate() {
  // Plans of a model differ by a few gaps. Rounding up lets the allocator put a new plan's slab where the old one was.
  constexpr int64_t unit = 2 << 20;
  for (const auto& slab : slabs_) {
    const auto tensor = memory_.allocate(slab->group, rounded_up(slab->bytes(), unit), slab->device);
    if (!tensor.defined()) continue;
    slab->memory = tensor.storage();
    slab->given_out.note(slab->device);
  }
}

}  // namespace fastddp
