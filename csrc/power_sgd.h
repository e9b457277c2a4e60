// PowerSGD's settings and what it remembers from one window to the next; exchange_power_sgd.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "exchange.h"
#include "low_rank.h"

namespace fastddp {

struct PowerSgdOptions {
  bool error_feedback;
  bool warm_start;
  bool batched;  // a bucket is one square matrix
  double epsilon;
  uint64_t seed;
  uint64_t first_window;                // what is random depends on the window's number
  std::optional<c10::ScalarType> wire;  // none: the gradients' dtype
};

// Owned by the caller and changed in place; the same Q on all ranks.
struct PowerSgdMemory {
  struct Matrix {
    at::Tensor error;  // [rows, columns], the gradients' dtype; undefined without error feedback, unless batched
    at::Tensor q;      // [rank, columns], fp32 or fp64, orthonormal rows; undefined: not compressed
  };
  std::vector<Matrix> of_parameters;  // by parameter; empty if batched
  std::vector<Matrix> of_buckets;     // if batched: squares
};

std::unique_ptr<Exchange> make_power_sgd(Lanes lanes, PowerSgdOptions options, PowerSgdMemory memory);

}  // namespace fastddp
