// The tables that tell block8's Triton kernels where gradients and shards are, and which part each program works on.
// kernels/block8_kernels.py says what each word means.
#pragma once

#include "block8/kernels.h"
#include "device/device_table.h"

namespace fastddp {

constexpr int64_t kRunWords = 4;

// Addresses, in order.
Words gradient_words(const std::vector<BlockedGradient>& gradients);
Words shard_words(const std::vector<at::Tensor>& shards);

// The words that the table of runs depends on.
Words place_words(const std::vector<BlockedGradient>& gradients);
// A row for each program, which takes up to `elements` elements, a multiple of a block's.
Words run_words(const std::vector<BlockedGradient>& gradients, Block8 format, int64_t elements);

}  // namespace fastddp
