// The part of a codec that ranks need while they add up its wires.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <vector>

namespace fastddp {

// Adds up wires that no collective can add, because their bytes are not numbers of the wire's dtype.
class Adder {
 public:
  virtual ~Adder() = default;

  // target = the sum of `shards`, which are the same part of each rank's wire of the bucket. The part begins with element `first`,
  // and this rank adds it up. `target` may be one of the shards. Runs on the current stream. On the CPU several threads may call it
  // at once, for different parts.
  virtual void add(size_t bucket, int64_t first, const std::vector<at::Tensor>& shards, const at::Tensor& target) {
    TORCH_CHECK(false, "fastddp: this codec's legs have an adds_unit, and it has no add()");
  }
};

}  // namespace fastddp
