// The few functions of the CUDA driver that launch compiled kernels. The driver's library is looked for when the first model is
// wrapped, so the extension builds and imports without CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>

namespace fastddp {

struct LaunchableFunction {
  void* function;  // CUfunction
  unsigned threads;
  unsigned shared_bytes;
};

// The driver has refused a launch: the kernel has done nothing, and the device is well. Anything else that a launch or another
// call answers with is c10::AcceleratorError if it is the device's (torch.AcceleratorError in Python, as torch raises), else
// c10::Error.
class LaunchError : public c10::Error {
 public:
  using c10::Error::Error;
};

class CudaDriver {
 public:
  // The driver of this kind of device; null where there is none.
  static const CudaDriver* of(c10::DeviceType type);

  // Makes the library at `path` the driver of this kind of device. Call before the first model is wrapped.
  static void use(c10::DeviceType type, const std::string& path);

  explicit CudaDriver(void* library);

  // Compute capability without the dot: 90 for an H100.
  int capability(c10::Device device) const;

  // Loads function `name` of a compiled module. Raises unless it takes `parameters` parameters of 8 bytes each, without gaps
  // (checked from CUDA 12.4 on).
  void* load(c10::Device device, const std::string& cubin, const std::string& name, unsigned shared_bytes,
             size_t parameters) const;

  // On the device's current stream. `parameters`: the address of each parameter's value. Raises LaunchError.
  void launch(const LaunchableFunction& function, unsigned programs, c10::Device device, void** parameters) const;

  // Raises the device's error if something that ran there has failed. Waits for nothing. Asks nothing while the current stream
  // is captured.
  void check_device(c10::Device device) const;

  // Whether the stream is being recorded as a graph.
  bool is_captured(const c10::Stream& stream) const;

  // While it lives, this thread may allocate memory and query events although a stream is being captured.
  class RelaxedCapture {
   public:
    RelaxedCapture(const CudaDriver& driver, c10::Device device);
    ~RelaxedCapture();
    RelaxedCapture(const RelaxedCapture&) = delete;

   private:
    const CudaDriver& driver_;
    int mode_;
  };

 private:
  struct Functions;

  static void* current_stream(c10::Device device);
  // All functions, for a thread that may have no context. Others take those that need none.
  const Functions& in_context(c10::Device device) const;
  void check(int result, const char* what) const;
  [[noreturn]] void fail(int result, const char* what) const;
  std::string words(int result, const char* what) const;
  void check_parameters(void* function, const std::string& name, size_t parameters) const;

  std::shared_ptr<const Functions> functions_;
};

// The same of the device's driver. Without one: nothing, false, or null.
void check_device(c10::Device device);
bool is_capturing(c10::Device device);  // its current stream
bool is_captured(const c10::Stream& stream);
std::unique_ptr<CudaDriver::RelaxedCapture> relaxed_capture(c10::Device device);

}  // namespace fastddp
