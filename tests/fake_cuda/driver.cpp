// The functions have the signatures of cuda.h. Modules are real cubins; kernels run as their twins, in the simulated
// streams.
#include "driver.h"

#include <array>
#include <cstring>
#include <map>
#include <stdexcept>

#include "cubin.h"
#include "graph.h"
#include "guard.h"
#include "memory.h"
#include "twin.h"

namespace {

using namespace fake_cuda;

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kOutOfResources = 701,
};

struct Text {
  const char* name;
  const char* words;
};

const std::map<int, Text>& texts() {
  static const auto* all = new std::map<int, Text>{
      {kSuccess, {"CUDA_SUCCESS", "no error"}},
      {kInvalidValue, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {kNotInitialized, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {kInvalidDevice, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {kInvalidImage, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {kInvalidContext, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {kNoBinary, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
      {kInvalidHandle, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {kNotFound, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {kIllegalAddress, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {kOutOfResources, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
  };
  return *all;
}

constexpr unsigned kSharedLimit = 48 << 10;        // of a block, unless a function asked for more
constexpr unsigned kOptInSharedLimit = 227 << 10;  // that it can ask for
constexpr unsigned kMaxThreads = 1024;             // of a block

// The primary contexts, by device. A context is known by its address.
struct Context {
  c10::DeviceIndex device;
};
std::array<Context, 64> contexts;

struct Module {
  Cubin cubin;
  Context* context;
};

struct Function {
  Kernel kernel;
  Context* context;
  unsigned shared_limit = kSharedLimit;
};

bool initialized = false;
int capability_of_devices = 90;
std::string broken;
Fault fault_of_broken = Fault::none;

Fault fault_of(const std::string& kernel) {
  return kernel.find(broken) == std::string::npos ? Fault::none : fault_of_broken;
}

Context* current_context() {
  return has_context() ? &contexts.at(static_cast<size_t>(current_device().index())) : nullptr;
}

// A binary for 9.0 runs on 9.x from there on.
bool runs_here(int compiled_for) {
  return compiled_for / 10 == capability_of_devices / 10 && compiled_for % 10 <= capability_of_devices % 10;
}

// The driver copies the parameters' values at the launch, as many and as large as the binary says.
std::vector<uint64_t> parameter_values(const Kernel& kernel, void** parameters) {
  std::vector<uint64_t> values;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    uint64_t value = 0;
    std::memcpy(&value, parameters[i], std::min(sizeof(value), kernel.parameters[i].size));
    values.push_back(value);
  }
  return values;
}

}  // namespace

void fake_cuda::break_kernels(const std::string& part_of_name, Fault fault) {
  broken = part_of_name;
  fault_of_broken = fault;
}

void fake_cuda::set_capability(int capability) {
  capability_of_devices = capability;
}

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int

DRIVER_API cuInit(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  for (size_t i = 0; i < contexts.size(); ++i) contexts[i].device = static_cast<c10::DeviceIndex>(i);
  initialized = true;
  return kSuccess;
}

DRIVER_API cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

DRIVER_API cuGetErrorString(int result, const char** text) {
  const auto found = texts().find(result);
  *text = found == texts().end() ? nullptr : found->second.words;
  return *text == nullptr ? kInvalidValue : kSuccess;
}

DRIVER_API cuGetErrorName(int result, const char** name) {
  const auto found = texts().find(result);
  *name = found == texts().end() ? nullptr : found->second.name;
  return *name == nullptr ? kInvalidValue : kSuccess;
}

DRIVER_API cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return kNotInitialized;
  if (ordinal < 0 || ordinal >= Simulator::get().device_count) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

DRIVER_API cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= Simulator::get().device_count) return kInvalidDevice;
  static const std::map<int, int> others = {
      {1, kMaxThreads}, {8, kSharedLimit}, {10, 32}, {16, 132}, {97, kOptInSharedLimit}};
  constexpr int major = 75, minor = 76;
  if (attribute == major || attribute == minor) {
    *value = attribute == major ? capability_of_devices / 10 : capability_of_devices % 10;
    return kSuccess;
  }
  const auto found = others.find(attribute);
  if (found == others.end()) return kInvalidValue;
  *value = found->second;
  return kSuccess;
}

DRIVER_API cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 0 || device >= Simulator::get().device_count) return kInvalidDevice;
  *context = &contexts.at(static_cast<size_t>(device));
  return kSuccess;
}

DRIVER_API cuCtxGetCurrent(void** context) {
  if (!initialized) return kNotInitialized;
  *context = current_context();
  return kSuccess;
}

DRIVER_API cuCtxSetCurrent(void* context) {
  set_context(context == nullptr ? c10::DeviceIndex(-1) : static_cast<Context*>(context)->device);
  return kSuccess;
}

DRIVER_API cuModuleLoadData(void** module, const void* image) {
  if (current_context() == nullptr) return kInvalidContext;
  try {
    auto cubin = read_cubin(image);
    if (!runs_here(cubin.capability)) return kNoBinary;
    for (const auto& [name, kernel] : cubin.kernels) {
      if (fault_of(name) == Fault::load) return kInvalidImage;
    }
    *module = new Module{std::move(cubin), current_context()};
    return kSuccess;
  } catch (const std::runtime_error&) {
    return kInvalidImage;
  }
}

DRIVER_API cuModuleUnload(void* module) {
  delete static_cast<Module*>(module);
  return kSuccess;
}

DRIVER_API cuModuleGetFunction(void** function, void* module, const char* name) {
  const auto& [cubin, context] = *static_cast<Module*>(module);
  const auto found = cubin.kernels.find(name);
  if (found == cubin.kernels.end()) return kNotFound;
  *function = new Function{found->second, context};
  return kSuccess;
}

DRIVER_API cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const auto& parameters = static_cast<Function*>(function)->kernel.parameters;
  if (index >= parameters.size()) return kInvalidValue;
  *offset = parameters[index].offset;
  if (size != nullptr) *size = parameters[index].size;
  return kSuccess;
}

DRIVER_API cuFuncSetAttribute(void* function, int attribute, int value) {
  constexpr int max_dynamic_shared = 8;
  if (attribute != max_dynamic_shared || value < 0 || value > static_cast<int>(kOptInSharedLimit)) return kInvalidValue;
  static_cast<Function*>(function)->shared_limit = static_cast<unsigned>(value);
  return kSuccess;
}

DRIVER_API cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** parameters,
                          void** extra) {
  if (!initialized) return kNotInitialized;
  if (handle == nullptr) return kInvalidHandle;
  const auto& function = *static_cast<Function*>(handle);
  const auto& kernel = function.kernel;
  if (current_context() == nullptr) return kInvalidContext;
  if (current_context() != function.context) return kInvalidHandle;
  auto& queue = queue_of_handle(stream);
  if (queue.device != current_context()->device) return kInvalidHandle;
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || parameters == nullptr || extra != nullptr) return kInvalidValue;
  const std::array<unsigned, 3> block = {block_x, block_y, block_z};
  if (kernel.required_block != std::array<unsigned, 3>{} && block != kernel.required_block) return kInvalidValue;
  if (size_t{block_x} * block_y * block_z - 1 >= kMaxThreads) return kInvalidValue;
  if (shared > function.shared_limit) return kInvalidValue;
  if (!has_twin(kernel)) return kNotFound;
  auto launch = read_launch(kernel, parameter_values(kernel, parameters), grid_x * grid_y * grid_z, queue.device);
  if (!launch.has_value()) return kInvalidValue;
  launch->fault = fault_of(kernel.name);
  if (launch->fault == Fault::launch) return kOutOfResources;
  Simulator::get().note_launch(kernel.name);
  // Where a real launch would fault later, the fault is an error of the operation: the next wait of the host raises it.
  const auto problem = problem_with_pointers(*launch);
  Simulator::get().enqueue(queue, {kernel.name, [launch = *launch, problem] { execute(launch, problem); }});
  return kSuccess;
}

DRIVER_API cuStreamIsCapturing(void* stream, int* status) {
  *status = queue_of_handle(stream).capture != nullptr ? 1 : 0;
  return kSuccess;
}

DRIVER_API cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode());
  return kSuccess;
}
