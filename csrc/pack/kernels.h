// The kernels of the data path, and who implements them on which device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pack/local_sums.h"

namespace fastddp {

// Where one gradient lives in a wire.
struct Slot {
  at::Tensor gradient;  // any strides; undefined: this rank has no gradient for the parameter
  at::Tensor view;      // the gradient's elements in the wire, with the strides of the parameter
  size_t member = 0;    // its number in the bucket, for those who measure gradients by member
};

at::Tensor measure_with_operators(const at::Tensor& values);
void measure_with_operators(const std::vector<Slot>& slots, LocalSums& sums);

// Of a bucket that is packed in parts: few launches, each at the speed of memory.
constexpr size_t kPartBytes = 4 << 20;

// How the gradients of one bucket are moved. One object a bucket: on a GPU it remembers the tables that are up there.
class Kernels {
 public:
  virtual ~Kernels() = default;

  // view = cast(gradient * scale) for every slot, zeros where the gradient is undefined. fp16 and bf16 are scaled in
  // fp32. A gradient that is its own view is scaled in place. The views of one call lie in one wire. `call`: how many calls
  // of the same window came before, since each has slots of its own to remember. `sums`: gets what the gradients are before
  // they are scaled; note [Local sums].
  virtual void pack(const std::vector<Slot>& slots, double scale, size_t call = 0, LocalSums* sums = nullptr) = 0;

  // What pack would leave in `sums`, of gradients that are not packed. Views are tensors like the gradients, and not read.
  virtual void measure_gradients(const std::vector<Slot>& slots, LocalSums& sums, size_t call = 0) {
    measure_with_operators(slots, sums);
  }

  // gradient = cast(view) for every slot; all gradients are defined. With `measuring` it returns what measure() would
  // for the values it moves, if it can see them on the way; else an undefined tensor.
  virtual at::Tensor unpack(const std::vector<Slot>& slots, bool measuring) = 0;

  // Partial results that add up to the sum of squares of a wire's elements, and to the number of those that are not
  // finite: [..., 2].
  virtual at::Tensor measure(const at::Tensor& wire) { return measure_with_operators(wire); }

  // Note [When to pack]
  // Where a call is a launch, a whole bucket is packed at once. On the CPU a call costs nothing, and a gradient is still
  // in cache when it arrives: there each one is packed on arrival, and with gradient_as_bucket_view its memory serves
  // the next one. On a GPU, too, gradients that move into the wire would lie beside it until their bucket is complete, a
  // bucket more than torch's DDP takes: so those that have come are packed together whenever they are kPartBytes.
  virtual bool pack_on_arrival() const { return false; }

  // Kernels launched, and tables sent to the device, by this object up to now.
  virtual size_t launches() const { return 0; }
  virtual size_t uploads() const { return 0; }
};

// What fits the device: the first two of those below, or torch's operators where neither can run.
std::unique_ptr<Kernels> make_kernels(c10::Device device);

std::unique_ptr<Kernels> make_cpu_kernels();                    // vectorised, spread over at::parallel_for
std::unique_ptr<Kernels> make_gpu_kernels(c10::Device device);  // launches the Triton kernels
std::unique_ptr<Kernels> make_aten_kernels();                   // right on every device and for every layout

// The same from torch's operators, for slots that the fast loops do not take; two launches a gradient.
void pack_with_operators(const std::vector<Slot>& slots, double scale);
void unpack_with_operators(const std::vector<Slot>& slots);

// Partial results as one fp64 pair, the sum of squares and the count.
at::Tensor add_up(const at::Tensor& partial_results);
// Partial results in place of those of a launch: what they add up to is in the first row of `partials`, zeros are in the others.
void write_sums(const at::Tensor& partial_results, const at::Tensor& partials);

// Whether `gradient` and `view` list their elements in the same order in memory without gaps, so that both can be read
// as flat arrays of values.
bool same_dense_layout(const at::Tensor& gradient, const at::Tensor& view);

}  // namespace fastddp
