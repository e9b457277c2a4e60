// Adds up wires that no collective can add, because their bytes are not numbers of the wire's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

// Belongs to one codec. Knows the meaning of its bytes, and nothing of the ranks that sent them.
class Adder {
 public:
  virtual ~Adder() = default;

  // A wire may be cut only at multiples of this many elements.
  virtual int64_t unit() const = 0;

  // target = the sum of `shards`, which are the same part of each rank's wire `number`. The part begins with element `first`,
  // and this rank adds it up. `target` may be one of the shards. Runs on the current stream.
  virtual void add(size_t number, int64_t first, const std::vector<at::Tensor>& shards, const at::Tensor& target) = 0;
};

}  // namespace fastddp
