// Stands for block8_kernels_cpu.cpp and block8_kernels_aten.cpp until they are here: delete it with them.
#include <c10/util/Exception.h>

#include "codec/block8_kernels.h"

namespace fastddp {

std::unique_ptr<Block8Kernels> make_block8_kernels(Block8 format, c10::Device device) {
  return device.is_cpu() ? make_cpu_block8_kernels(format) : make_gpu_block8_kernels(format, device);
}

std::unique_ptr<Block8Kernels> make_cpu_block8_kernels(Block8) {
  TORCH_CHECK(false, "fastddp: no block8 for the CPU yet");
}

std::unique_ptr<Block8Kernels> make_aten_block8_kernels(Block8) {
  return nullptr;
}

}  // namespace fastddp
