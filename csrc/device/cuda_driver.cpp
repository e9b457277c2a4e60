#include "device/cuda_driver.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "device/streams.h"
#include "errors/see.h"

namespace fastddp {
namespace {

// Values of the driver's interface, which are part of its ABI.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
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

// Note [Whose error it is]
// The driver answers a call also with the error of what ran on the device before, such as an illegal access by any kernel of the
// process. Nothing runs on that device any more, so an answer of this kind must not pass for a kernel that the driver refuses:
// a job would go on by operators, and be told that its gradients are right. So the results that speak about a launch, or about
// another call, are listed. All others count as the device's, and so do those of drivers to come.
enum class Whose { launch, call, device };

Whose whose(int result) {
  // Invalid value, no memory, invalid image, no binary for the device, invalid PTX, invalid handle, not found, out of resources.
  // Memory is of the launch: the driver takes it to load a kernel that it loads late, or for its stack, and if there is none
  // nothing has run. Operators take theirs from torch's allocator, which says well what is missing if there is none either.
  constexpr std::array launches{1, 2, 200, 209, 218, 400, 500, 701};
  // Memory, NVLink or the device itself has lost bits that it cannot correct; unknown.
  constexpr std::array devices{214, 220, 226, 999};
  if (std::ranges::find(launches, result) != launches.end()) return Whose::launch;
  if (std::ranges::find(devices, result) != devices.end()) return Whose::device;
  const bool is_call = result < 700 || (result >= 800 && result < 1000);  // permissions and captures are in the latter
  return is_call ? Whose::call : Whose::device;
}

// A function of the driver's library, as whatever type it is assigned to.
struct Found {
  void* address;
  template <typename Function>
  operator Function() const {
    return reinterpret_cast<Function>(address);
  }
};

Found find(void* library, const char* name) {
  auto* const address = dlsym(library, name);
  TORCH_CHECK(address != nullptr, "fastddp: the CUDA driver has no ", name,
              ". fastddp needs a driver for CUDA 12 or newer: update it.", see("FD040"));
  return {address};
}

}  // namespace

struct CudaDriver::Functions {
  void* library;
  int (*cuInit)(unsigned) = find(library, "cuInit");
  int (*cuGetErrorName)(int, const char**) = find(library, "cuGetErrorName");
  int (*cuGetErrorString)(int, const char**) = find(library, "cuGetErrorString");
  int (*cuDeviceGet)(int*, int) = find(library, "cuDeviceGet");
  int (*cuDeviceGetAttribute)(int*, int, int) = find(library, "cuDeviceGetAttribute");
  int (*cuCtxGetCurrent)(void**) = find(library, "cuCtxGetCurrent");
  int (*cuCtxSetCurrent)(void*) = find(library, "cuCtxSetCurrent");
  int (*cuDevicePrimaryCtxRetain)(void**, int) = find(library, "cuDevicePrimaryCtxRetain");
  int (*cuModuleLoadData)(void**, const void*) = find(library, "cuModuleLoadData");
  int (*cuModuleGetFunction)(void**, void*, const char*) = find(library, "cuModuleGetFunction");
  int (*cuFuncSetAttribute)(void*, int, int) = find(library, "cuFuncSetAttribute");
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**) = find(library, "cuLaunchKernel");
  int (*cuStreamQuery)(void*) = find(library, "cuStreamQuery");
  int (*cuStreamIsCapturing)(void*, int*) = find(library, "cuStreamIsCapturing");
  int (*cuThreadExchangeStreamCaptureMode)(int*) = find(library, "cuThreadExchangeStreamCaptureMode");
  // Null before CUDA 12.4.
  int (*cuFuncGetParamInfo)(void*, size_t, size_t*, size_t*) = Found{dlsym(library, "cuFuncGetParamInfo")};
};

CudaDriver::CudaDriver(void* library) : functions_(new Functions{library}) {
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
  const auto& functions = in_context(device);
  void *module = nullptr, *function = nullptr;
  check(functions.cuModuleLoadData(&module, cubin.data()), "loading a kernel");
  check(functions.cuModuleGetFunction(&function, module, name.c_str()), "finding a kernel in its module");
  check_parameters(function, name, parameters);
  if (shared_bytes > kSharedLimit) {
    check(functions.cuFuncSetAttribute(function, kMaxDynamicShared, static_cast<int>(shared_bytes)),
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

void CudaDriver::launch(const LaunchableFunction& function, unsigned programs, c10::Device device, void** parameters) const {
  constexpr auto what = "launching a kernel";
  const c10::DeviceGuard guard(device);
  const auto& functions = in_context(device);
  const auto result = functions.cuLaunchKernel(function.function, programs, 1, 1, function.threads, 1, 1, function.shared_bytes,
                                               current_stream(device), parameters, nullptr);
  if (result == kSuccess) return;
  if (whose(result) != Whose::launch) fail(result, what);
  throw LaunchError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, words(result, what));
}

void CudaDriver::check_device(c10::Device device) const {
  if (is_capturing(device)) return;  // asking would end the capture
  const c10::DeviceGuard guard(device);
  const auto result = in_context(device).cuStreamQuery(current_stream(device));
  if (result != kNotReady) check(result, "asking whether the device goes on");
}

bool CudaDriver::is_captured(const c10::Stream& stream) const {
  auto* handle = c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream);
  if (handle == nullptr) return false;  // the default stream, which cannot be captured
  int status = 0;
  check(in_context(stream.device()).cuStreamIsCapturing(handle, &status), "asking whether a stream is being captured");
  return status == kCaptureActive;
}

CudaDriver::RelaxedCapture::RelaxedCapture(const CudaDriver& driver, c10::Device device)
    : driver_(driver), mode_(kCaptureRelaxed) {
  driver_.check(driver_.in_context(device).cuThreadExchangeStreamCaptureMode(&mode_), "changing the mode of captures");
}

CudaDriver::RelaxedCapture::~RelaxedCapture() {
  driver_.functions_->cuThreadExchangeStreamCaptureMode(&mode_);
}

void* CudaDriver::current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl streams(device.type());
  return streams.getStreamNativeHandle(streams.getStream(device));
}

// A thread that has not called the runtime yet has no context. The runtime's context is the device's primary one.
const CudaDriver::Functions& CudaDriver::in_context(c10::Device device) const {
  void* context = nullptr;
  check(functions_->cuCtxGetCurrent(&context), "asking for the context");
  if (context != nullptr) return *functions_;
  int handle = 0;
  check(functions_->cuDeviceGet(&handle, device.index()), "asking for a device");
  check(functions_->cuDevicePrimaryCtxRetain(&context, handle), "retaining a device's context");
  check(functions_->cuCtxSetCurrent(context), "making a device's context current");
  return *functions_;
}

void CudaDriver::check(int result, const char* what) const {
  if (result != kSuccess) fail(result, what);
}

void CudaDriver::fail(int result, const char* what) const {
  TORCH_CHECK(whose(result) == Whose::device, words(result, what));
  constexpr auto advice =
      ". This is the error of something that ran earlier on the device, and the device runs nothing more for this process. Do "
      "not use the gradients of this step: restart the process, from a checkpoint. To find what failed, run it with "
      "CUDA_LAUNCH_BLOCKING=1 in the environment, or under compute-sanitizer.";
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, result,
                              c10::str(words(result, what), advice, see("FD045")));
}

std::string CudaDriver::words(int result, const char* what) const {
  const char *name = nullptr, *text = nullptr;  // null where the driver does not know the result
  functions_->cuGetErrorName(result, &name);
  functions_->cuGetErrorString(result, &text);
  return c10::str("fastddp: ", what, " failed with CUDA error ", result, " (", name != nullptr ? name : "unknown",
                  "): ", text != nullptr ? text : "the driver has no words for it");
}

bool is_capturing(c10::Device device) {
  const auto* driver = CudaDriver::of(device.type());
  return driver != nullptr && driver->is_captured(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

bool is_captured(const c10::Stream& stream) {
  const auto* driver = CudaDriver::of(stream.device_type());
  return driver != nullptr && driver->is_captured(stream);
}

void check_device(c10::Device device) {
  const auto* driver = CudaDriver::of(device.type());
  if (driver != nullptr) driver->check_device(device);
}

std::unique_ptr<CudaDriver::RelaxedCapture> relaxed_capture(c10::Device device) {
  const auto* driver = CudaDriver::of(device.type());
  return driver == nullptr ? nullptr : std::make_unique<CudaDriver::RelaxedCapture>(*driver, device);
}

}  // namespace fastddp
