// How what travels is added up, where it is no numbers that a collective could add.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

// Of one codec. Knows what its bytes mean, and nothing of who sent them.
class Adder {
 public:
  virtual ~Adder() = default;

  // Elements of a wire that cannot be parted.
  virtual int64_t unit() const = 0;

  // target = the sum of `shards`, each a part of some rank's wire. It is this rank's to add up, and begins with element `first`
  // of wire `number`. `target` may be one of the shards. On the current stream.
  virtual void add(size_t number, int64_t first, const std::vector<at::Tensor>& shards, const at::Tensor& target) = 0;
};

}  // namespace fastddp
