#include "pack/kernels.h"

#include "device/cuda_driver.h"

namespace fastddp {

std::unique_ptr<Kernels> make_kernels(c10::Device device) {
  if (device.is_cpu()) return make_cpu_kernels();
  return CudaDriver::of(device.type()) != nullptr ? make_gpu_kernels(device) : make_aten_kernels();
}

}  // namespace fastddp
