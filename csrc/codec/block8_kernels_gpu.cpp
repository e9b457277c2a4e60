#include "codec/block8_kernels.h"

namespace fastddp {

std::unique_ptr<Block8Kernels> make_gpu_block8_kernels(Block8 format, c10::Device) {
  return make_aten_block8_kernels(format);
}

}  // namespace fastddp
