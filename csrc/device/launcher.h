// Launches of kernels on one device, and the memory for what they write beside gradients, wires and factors: partial sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

#include "device/compiled_kernels.h"

namespace fastddp {

// In a trial memory for partial sums is NaN before a launch, so that a number which a kernel leaves out shows. There is other
// memory around it, which shows whether a kernel has written there.
class Launcher {
 public:
  // The device has a driver.
  explicit Launcher(c10::Device device, Purpose purpose = Purpose::training)
      : device_(with_index(device)), driver_(*CudaDriver::of(device.type())), purpose_(purpose) {}

  // As find_kernel().
  const LoadedKernel* find(const std::string& name) const { return find_kernel(device_, name, purpose_); }

  // Launches on the device's current stream. Arguments are tensors (null if undefined), pointers, double and int64_t, as the
  // kernel's module lists them. No programs (no elements): no launch.
  template <typename... Arguments>
  void run(const LoadedKernel& kernel, int64_t programs, const Arguments&... arguments) {
    TORCH_INTERNAL_ASSERT(sizeof...(Arguments) == kernel.parameters);
    if (programs == 0) return;
    const void* scratch = nullptr;
    std::tuple values{word_of(arguments)...};
    std::apply(
        [&](auto&... value) {
          void* parameters[sizeof...(Arguments) + kMostScratch] = {&value..., &scratch, &scratch};
          driver_.launch(kernel.function, static_cast<unsigned>(programs), device_, parameters);
        },
        values);
    ++launches_;
  }

  // Launches the kernel that writes words, at most as many as its tile's first number says; zeros make them a multiple of the
  // second, for which `target` has room.
  void write(const LoadedKernel& kernel, const at::Tensor& target, std::vector<int64_t> words) const;

  at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype);

  // Where a launch writes what belongs into `rows`, contiguous: there, except in a trial. After the launch, move() brings it
  // there.
  at::Tensor instead_of(const at::Tensor& rows);
  static void move(const at::Tensor& written, const at::Tensor& rows);

  // How many kernels it has launched, and how many tables were sent to the device for them, so far.
  size_t launches() const { return launches_; }
  size_t uploads() const { return uploads_; }
  void note_upload() { ++uploads_; }
  // In a trial: whether a kernel has written beside what it was given. The host waits for the device.
  bool wrote_around() const;

  c10::Device device() const { return device_; }

 private:
  static constexpr double kAround = 7.0;

  static const void* word_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
  template <typename Word>
  static Word word_of(Word word) {
    static_assert(sizeof(Word) == 8);
    return word;
  }

  const c10::Device device_;
  const CudaDriver& driver_;
  const Purpose purpose_;
  std::vector<at::Tensor> around_;
  size_t launches_ = 0;
  size_t uploads_ = 0;
};

// Whether `launch`, which launches these kernels, has done the work. If not, torch's operators have to do all of it: a kernel is
// null, or the driver has refused a launch. Then all these kernels are given up, with a warning.
template <typename Launch>
bool launched(std::initializer_list<const LoadedKernel*> kernels, const Launch& launch) {
  if (std::ranges::find(kernels, nullptr) != kernels.end()) return false;
  try {
    launch();
    return true;
  } catch (const LaunchError& error) {
    give_up(kernels, error);
    return false;
  }
}

// What each of the objects that call kernels tells of itself.
class CallsKernels {
 public:
  virtual ~CallsKernels() = default;
  // Null: it launches none.
  virtual const Launcher* launcher() const { return nullptr; }
};

}  // namespace fastddp
