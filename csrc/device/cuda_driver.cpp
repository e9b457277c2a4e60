#include "device/cuda_driver.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "device/see.h"
#include "device/streams.h"

namespace fastddp {
namespace {

// Values of the driver's interface, which are part of its ABI.
constexpr int kSuccess = 0;
constexpr int kCapabilityMajor = 75;         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kCapabilityMinor = 76;         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int kMaxDynamicShared = 8;         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kCaptureActive = 1;            // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kCaptureRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kSharedLimit = 48 << 10;  // without asking for more

std::mutex drivers_mutex;

// Note [Never destroyed]
// Static variables of this extension are references or pointers to objects that nobody deletes, so these live as long as the
// process. Destructors of static variables run when the process ends, while threads that need no Python, such as autograd's,
// still run: a backward in a daemon thread would launch kernels that no longer exist.
std::map<c10::DeviceType, std::unique_ptr<CudaDriver>>& drivers() {
  static auto& all = *new std::map<c10::DeviceType, std::unique_ptr<CudaDriver>>();
  return all;
}

}  // namespace

struct CudaDriver::Functions {
  int (*cuInit)(unsigned);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuModuleLoadData)(void**, const void*);
  int (*cuModuleGetFunction)(void**, void*, const char*);
  int (*cuFuncSetAttribute)(void*, int, int);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**);
  int (*cuStreamIsCapturing)(void*, int*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuFuncGetParamInfo)(void*, size_t, size_t*, size_t*);  // null before CUDA 12.4
};

CudaDriver::CudaDriver(void* library) {
  auto functions = std::make_shared<Functions>();
  const auto find = [&](auto& function, const char* name, bool needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    TORCH_CHECK(function != nullptr || !needed, "fastddp: the CUDA driver has no ", name,
                ". fastddp needs a driver for CUDA 12 or newer: update it.", see("FD040"));
  };
  find(functions->cuInit, "cuInit");
  find(functions->cuGetErrorString, "cuGetErrorString");
  find(functions->cuDeviceGet, "cuDeviceGet");
  find(functions->cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(functions->cuCtxGetCurrent, "cuCtxGetCurrent");
  find(functions->cuCtxSetCurrent, "cuCtxSetCurrent");
  find(functions->cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(functions->cuModuleLoadData, "cuModuleLoadData");
  find(functions->cuModuleGetFunction, "cuModuleGetFunction");
  find(functions->cuFuncSetAttribute, "cuFuncSetAttribute");
  find(functions->cuLaunchKernel, "cuLaunchKernel");
  find(functions->cuStreamIsCapturing, "cuStreamIsCapturing");
  find(functions->cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  find(functions->cuFuncGetParamInfo, "cuFuncGetParamInfo", /*needed=*/false);
  functions_ = std::move(functions);
  check(functions_->cuInit(0), "starting the CUDA driver");
}

const CudaDriver* CudaDriver::of(c10::DeviceType type) {
  const std::lock_guard lock(drivers_mutex);
  const auto found = drivers().find(type);
  if (found != drivers().end()) return found->second.get();
  if (type != c10::DeviceType::CUDA) return nullptr;
  // ROCm has no such library, although its devices are CUDA devices to torch.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return (drivers()[type] = library == nullptr ? nullptr : std::make_unique<CudaDriver>(library)).get();
}

void CudaDriver::use(c10::DeviceType type, const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK_VALUE(library != nullptr, "fastddp: cannot load ", path, " as a CUDA driver: ", dlerror());
  const std::lock_guard lock(drivers_mutex);
  drivers()[type] = std::make_unique<CudaDriver>(library);
}

int CudaDriver::capability(c10::Device device) const {
  int handle = 0, major = 0, minor = 0;
  check(functions_->cuDeviceGet(&handle, device.has_index() ? device.index() : 0), "asking for a device");
  check(functions_->cuDeviceGetAttribute(&major, kCapabilityMajor, handle), "asking for the compute capability");
  check(functions_->cuDeviceGetAttribute(&minor, kCapabilityMinor, handle), "asking for the compute capability");
  return 10 * major + minor;
}

void* CudaDriver::load(c10::Device device, const std::string& cubin, const std::string& name, unsigned shared_bytes,
                       size_t parameters) const {
  const c10::DeviceGuard guard(device);
  need_context(device);
  void *module = nullptr, *function = nullptr;
  check(functions_->cuModuleLoadData(&module, cubin.data()), "loading a kernel");
  check(functions_->cuModuleGetFunction(&function, module, name.c_str()), "finding a kernel in its module");
  check_parameters(function, name, parameters);
  if (shared_bytes > kSharedLimit) {
    check(functions_->cuFuncSetAttribute(function, kMaxDynamicShared, static_cast<int>(shared_bytes)),
          "asking for shared memory");
  }
  return function;
}

void CudaDriver::check_parameters(void* function, const std::string& name, size_t parameters) const {
  if (functions_->cuFuncGetParamInfo == nullptr) return;
  constexpr size_t width = 8;
  size_t offset = 0, size = 0;
  bool as_expected = true;
  for (size_t i = 0; i < parameters && as_expected; ++i) {
    as_expected =
        functions_->cuFuncGetParamInfo(function, i, &offset, &size) == kSuccess && size == width && offset == i * width;
  }
  as_expected = as_expected && functions_->cuFuncGetParamInfo(function, parameters, &offset, &size) != kSuccess;
  TORCH_CHECK(as_expected, "fastddp: kernel ", name, " does not take the ", parameters,
              " parameters of 8 bytes that fastddp launches it with: was it compiled by another version of Triton? "
              "Empty Triton's cache (~/.triton/cache) and use a version of Triton that fastddp names as supported.",
              see("FD040"));
}

void CudaDriver::launch(const LaunchableFunction& function, unsigned programs, c10::Device device,
                        void** parameters) const {
  const c10::DeviceGuard guard(device);
  need_context(device);
  const c10::impl::VirtualGuardImpl streams(device.type());
  auto* stream = streams.getStreamNativeHandle(streams.getStream(device));
  const auto result = functions_->cuLaunchKernel(function.function, programs, 1, 1, function.threads, 1, 1,
                                                 function.shared_bytes, stream, parameters, nullptr);
  if (result != kSuccess) {
    throw LaunchError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, words(result, "launching a kernel"));
  }
}

bool CudaDriver::is_capturing(c10::Device device) const {
  return is_captured(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool CudaDriver::is_captured(const c10::Stream& stream) const {
  auto* handle = c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream);
  if (handle == nullptr) return false;  // the default stream, which cannot be captured
  need_context(stream.device());
  int status = 0;
  check(functions_->cuStreamIsCapturing(handle, &status), "asking whether a stream is being captured");
  return status == kCaptureActive;
}

CudaDriver::RelaxedCapture::RelaxedCapture(const CudaDriver& driver) : driver_(driver), mode_(kCaptureRelaxed) {
  driver_.check(driver_.functions_->cuThreadExchangeStreamCaptureMode(&mode_), "changing the mode of captures");
}

CudaDriver::RelaxedCapture::~RelaxedCapture() {
  driver_.functions_->cuThreadExchangeStreamCaptureMode(&mode_);
}

// A thread that has not called the runtime yet has no context. The runtime's context is the device's primary one.
void CudaDriver::need_context(c10::Device device) const {
  void* context = nullptr;
  check(functions_->cuCtxGetCurrent(&context), "asking for the context");
  if (context != nullptr) return;
  int handle = 0;
  check(functions_->cuDeviceGet(&handle, device.index()), "asking for a device");
  check(functions_->cuDevicePrimaryCtxRetain(&context, handle), "retaining a device's context");
  check(functions_->cuCtxSetCurrent(context), "making a device's context current");
}

void CudaDriver::check(int result, const char* what) const {
  TORCH_CHECK(result == kSuccess, words(result, what));
}

std::string CudaDriver::words(int result, const char* what) const {
  const char* text = nullptr;
  functions_->cuGetErrorString(result, &text);
  return c10::str("fastddp: ", what, " failed with CUDA error ", result, ": ", text != nullptr ? text : "unknown");
}

bool is_capturing(c10::Device device) {
  const auto* driver = CudaDriver::of(device.type());
  return driver != nullptr && driver->is_capturing(device);
}

bool is_captured(const c10::Stream& stream) {
  const auto* driver = CudaDriver::of(stream.device_type());
  return driver != nullptr && driver->is_captured(stream);
}

std::unique_ptr<CudaDriver::RelaxedCapture> relaxed_capture(c10::Device device) {
  const auto* driver = CudaDriver::of(device.type());
  return driver == nullptr ? nullptr : std::make_unique<CudaDriver::RelaxedCapture>(*driver);
}

}  // namespace fastddp
