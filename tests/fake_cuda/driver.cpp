// A stand-in for libcuda: the functions that fastddp's launcher looks up, with the signatures of cuda.h. Modules are real
// cubins; kernels run as their twins, in the simulated streams.
#include <c10/util/Exception.h>

#include <cstring>
#include <stdexcept>

#include "cubin.h"
#include "guard.h"
#include "memory.h"
#include "twin.h"

namespace fake_cuda {
void set_capability(int capability);
}

namespace {

using namespace fake_cuda;

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidImage = 200,
  kNoBinary = 209,
  kNotFound = 500,
  kInvalidHandle = 400,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
};

constexpr unsigned kSharedLimit = 48 << 10;

struct Module {
  Cubin cubin;
};

struct Function {
  Kernel kernel;
  unsigned shared_limit = kSharedLimit;
};

int capability = 90;
int context;  // its address is the one context there is

thread_local void* current_context = nullptr;

template <typename T>
T parameter(const Function& function, void** parameters, size_t index) {
  TORCH_CHECK(function.kernel.parameters.at(index).size == sizeof(T), "parameter ", index, " of kernel ",
              function.kernel.name, " has ", function.kernel.parameters[index].size, " bytes, not ", sizeof(T));
  T value;
  std::memcpy(&value, parameters[index], sizeof(T));
  return value;
}

}  // namespace

void fake_cuda::set_capability(int value) {
  capability = value;
}

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int

DRIVER_API cuInit(unsigned) {
  return kSuccess;
}

DRIVER_API cuGetErrorString(int result, const char** text) {
  switch (result) {
    case kInvalidValue:
      *text = "invalid argument";
      break;
    case kInvalidImage:
      *text = "device kernel image is invalid";
      break;
    case kNoBinary:
      *text = "no kernel image is available for execution on the device";
      break;
    case kNotFound:
      *text = "named symbol not found";
      break;
    case kInvalidHandle:
      *text = "invalid resource handle";
      break;
    case kIllegalAddress:
      *text = "an illegal memory access was encountered";
      break;
    case kLaunchOutOfResources:
      *text = "too many resources requested for launch";
      break;
    default:
      *text = nullptr;
      return kInvalidValue;
  }
  return kSuccess;
}

DRIVER_API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < Simulator::get().device_count ? kSuccess : kInvalidValue;
}

DRIVER_API cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int major = 75, minor = 76;
  if (attribute != major && attribute != minor) return kInvalidValue;
  *value = attribute == major ? capability / 10 : capability % 10;
  return kSuccess;
}

DRIVER_API cuCtxGetCurrent(void** current) {
  *current = current_context;
  return kSuccess;
}

DRIVER_API cuCtxSetCurrent(void* next) {
  current_context = next;
  return kSuccess;
}

DRIVER_API cuDevicePrimaryCtxRetain(void** retained, int) {
  *retained = &context;
  return kSuccess;
}

DRIVER_API cuModuleLoadData(void** module, const void* image) {
  if (current_context == nullptr) return kInvalidValue;
  try {
    const auto cubin = read_cubin(image);
    if (cubin.capability != capability) return kNoBinary;
    *module = new Module{cubin};
    return kSuccess;
  } catch (const std::runtime_error&) {
    return kInvalidImage;
  }
}

DRIVER_API cuModuleGetFunction(void** function, void* module, const char* name) {
  const auto& kernels = static_cast<Module*>(module)->cubin.kernels;
  const auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  *function = new Function{found->second};
  return kSuccess;
}

DRIVER_API cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const auto& parameters = static_cast<Function*>(function)->kernel.parameters;
  if (index >= parameters.size()) return kInvalidValue;
  *offset = parameters[index].offset;
  *size = parameters[index].size;
  return kSuccess;
}

DRIVER_API cuFuncSetAttribute(void* function, int attribute, int value) {
  constexpr int max_dynamic_shared = 8;
  if (attribute != max_dynamic_shared) return kInvalidValue;
  static_cast<Function*>(function)->shared_limit = static_cast<unsigned>(value);
  return kSuccess;
}

DRIVER_API cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                          void** extra) {
  const auto& function = *static_cast<Function*>(handle);
  auto& queue = *static_cast<Queue*>(stream);
  const auto threads = block_x * block_y * block_z;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || extra != nullptr) return kInvalidValue;
  if (threads != function.kernel.required_threads) return kInvalidValue;
  if (shared > function.shared_limit) return kLaunchOutOfResources;
  if (current_context == nullptr || queue.device != current_device().index()) return kInvalidHandle;
  constexpr size_t wire = 0, table = 1, chunks = 2, scale = 3, first_scratch = 4;
  for (size_t i = first_scratch; i < function.kernel.parameters.size(); ++i) {
    if (parameter<void*>(function, parameters, i) != nullptr) return kInvalidValue;
  }
  try {
    check_name(function.kernel.name);
  } catch (const c10::Error&) {
    return kNotFound;
  }
  const Launch launch{function.kernel.name,
                      parameter<char*>(function, parameters, wire),
                      parameter<const int64_t*>(function, parameters, table),
                      parameter<const int64_t*>(function, parameters, chunks),
                      parameter<double>(function, parameters, scale),
                      grid_x,
                      queue.device};
  constexpr size_t chunk_bytes = 4 * sizeof(int64_t);
  if (!is_memory(launch.wire, 1, launch.device, true) || !is_memory(launch.table, 1, launch.device, true) ||
      !is_memory(launch.chunks, grid_x * chunk_bytes, launch.device, true)) {
    return kIllegalAddress;
  }
  auto& simulator = Simulator::get();
  simulator.launches.push_back(launch.kernel);
  simulator.enqueue(queue, [launch] { execute(launch); });
  return kSuccess;
}

DRIVER_API cuStreamIsCapturing(void* stream, int* status) {
  *status = static_cast<Queue*>(stream)->capturing ? 1 : 0;
  return kSuccess;
}

DRIVER_API cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode());
  return kSuccess;
}
