// The kernels of the data path, and who implements them on which device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

// Where one gradient lives in a wire.
struct Slot {
  at::Tensor gradient;  // any strides; undefined: this rank has no gradient for the parameter
  at::Tensor view;      // the gradient's elements in the wire, with the strides of the parameter
};

// One implementation per kind of device; stateless, shared by all reducers.
class Kernels {
 public:
  virtual ~Kernels() = default;

  // view = cast(gradient * scale) for every slot, zeros where the gradient is undefined. fp16 and bf16 are scaled in
  // fp32. A gradient that is its own view is scaled in place.
  virtual void pack(const std::vector<Slot>& slots, double scale) const = 0;

  // gradient = cast(view) for every slot; all gradients are defined.
  virtual void unpack(const std::vector<Slot>& slots) const = 0;

  // Note [When to pack]
  // Where a call is a launch, a whole bucket is packed at once. On the CPU a call costs nothing, and a gradient is still
  // in cache when it arrives: there each one is packed on arrival, and with gradient_as_bucket_view its memory serves
  // the next one.
  virtual bool pack_on_arrival() const = 0;
};

// CPU: vectorised, spread over at::parallel_for (kernels_cpu.cpp). Anything else: torch's own operators
// (kernels_aten.cpp).
const Kernels& kernels_for(c10::Device device);

const Kernels& cpu_kernels();
const Kernels& aten_kernels();

// Whether `gradient` and `view` list their elements in the same order in memory without gaps, so that both can be read
// as flat arrays.
bool same_dense_layout(const at::Tensor& gradient, const at::Tensor& view);

}  // namespace fastddp
