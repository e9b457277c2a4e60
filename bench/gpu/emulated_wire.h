// What the process group (C++, any device) asks of the kernel (CUDA): no torch in it, so that each side compiles alone.
#pragma once

#include <cstdint>

namespace emulated_wire {

enum class Element : std::uint8_t { none, float16, bfloat16, float32 };

// Occupies `blocks` multiprocessors of `stream` (a cudaStream_t) for `nanoseconds`, counted from its own start. On the
// way it multiplies `count` elements at `data` by `factor`, evenly spread over that time; Element::none leaves them.
// Returns a cudaError_t.
int launch_transfer(void* stream, int blocks, std::uint64_t nanoseconds, void* data, std::int64_t count,
                    Element element, double factor);

}  // namespace emulated_wire
