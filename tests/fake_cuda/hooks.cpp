// What torch asks an accelerator.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "guard.h"
#include "memory.h"

namespace fake_cuda {
namespace {

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return Simulator::get().device_count;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device().index();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return current_device();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
};

}  // namespace

void install_hooks() {
  static const bool once = [] {
    c10::SetAllocator(kType, device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    return true;
  }();
  (void)once;
}

}  // namespace fake_cuda
