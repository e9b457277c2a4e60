// In place of the kernel of bench/gpu/emulated_wire.cu: collectives take no time, and leave what they carry as it is.
#include "emulated_wire.h"

namespace emulated_wire {

int launch_transfer(void*, int, std::uint64_t, void*, std::int64_t, Element, double) {
  return 0;
}

}  // namespace emulated_wire
