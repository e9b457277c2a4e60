// The kernels of the data path, and who implements them on which device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "device/launcher.h"
#include "pack/local_sums.h"

namespace fastddp {

// Where one gradient lives in a wire.
struct Slot {
  at::Tensor gradient;  // any strides; undefined: this rank has no gradient for the parameter
  at::Tensor view;      // the gradient's elements in the wire, with the strides of the parameter
  size_t member = 0;    // its number in the bucket, for sums by member
};

at::Tensor measure_with_operators(const at::Tensor& values);
void measure_with_operators(const std::vector<Slot>& slots, LocalSums& sums);

// The size of a part, if a bucket is packed in parts: few launches, each at the speed of memory.
constexpr size_t kPartBytes = 12 << 20;

// Moves the gradients of one bucket. There is one object a bucket: on a GPU it remembers the tables on the device.
class Kernels : public CallsKernels {
 public:
  // view = cast(gradient * scale) for every slot, zeros where the gradient is undefined. fp16 and bf16 are scaled in fp32. A
  // gradient that is its own view is scaled in place. The views of one call lie in one wire. `call`: how many calls of the same
  // window came before; each call has its own slots. `sums`: note [Local sums]; gets the sums of the gradients before
  // they are scaled.
  virtual void pack(const std::vector<Slot>& slots, double scale, size_t call = 0, LocalSums* sums = nullptr) = 0;

  // Adds to `sums` what pack would, and packs nothing. Views are tensors like the gradients, and are not read.
  virtual void measure_gradients(const std::vector<Slot>& slots, LocalSums& sums, size_t call = 0) {
    measure_with_operators(slots, sums);
  }

  // gradient = cast(view) for every slot whose gradient is defined. Views may lie in several wires. With `measuring` it returns what measure() would return for
  // the values that it moves, if it can see them on the way; else an undefined tensor.
  virtual at::Tensor unpack(const std::vector<Slot>& slots, bool measuring) = 0;

  // Partial results, [..., 2]. They add up to the sum of squares of a wire's elements and the number of those that are not
  // finite.
  virtual at::Tensor measure(const at::Tensor& wire) { return measure_with_operators(wire); }

  // Note [When to pack]
  // Where a call is a launch, a whole bucket is packed at once. On the CPU a call costs nothing, and a gradient is still in cache
  // when it arrives. So each gradient is packed on arrival, and with gradient_as_bucket_view its memory serves the next one. On a
  // GPU, gradients that move into the wire would also lie beside it until their bucket is complete: one bucket more than torch's
  // DDP takes. So gradients that have come are packed together as soon as they make kPartBytes.
  virtual bool pack_on_arrival() const { return false; }
};

// The kernels that fit the device: the first below on the CPU, those that launch Triton kernels on a GPU, or torch's operators
// where neither can run.
std::unique_ptr<Kernels> make_kernels(c10::Device device, Purpose purpose = Purpose::training);

std::unique_ptr<Kernels> make_cpu_kernels();   // vectorised, spread over at::parallel_for
std::unique_ptr<Kernels> make_aten_kernels();  // right on every device and for every layout

// pack() and unpack() by torch's operators, for slots that the fast loops do not take; two launches a gradient.
void pack_with_operators(const std::vector<Slot>& slots, double scale);
void unpack_with_operators(const std::vector<Slot>& slots);

// Adds up partial results to one fp64 pair, the sum of squares and the count.
at::Tensor add_up(const at::Tensor& partial_results);

// Whether `gradient` and `view` list their elements in the same order in memory without gaps, so that both can be read
// as flat arrays of values.
bool same_dense_layout(const at::Tensor& gradient, const at::Tensor& view);

}  // namespace fastddp
