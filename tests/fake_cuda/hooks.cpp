#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

#include "guard.h"
#include "memory.h"

namespace fake_cuda {
namespace {

// One for all devices.
at::Generator& generator() {
  static at::Generator generator = at::detail::createCPUGenerator();
  return generator;
}

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Simulator::get().device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    c10::impl::getDeviceGuardImpl(kType)->setDevice(c10::Device(kType, index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return c10::impl::getDeviceGuardImpl(kType)->exchangeDevice(c10::Device(kType, index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Device getDeviceFromPtr(void*) const override { return current_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

void install_hooks() {
  c10::SetAllocator(kType, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

uint64_t next_seed() {
  const std::lock_guard lock(generator().mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator())->random64();
}

void manual_seed(uint64_t seed) {
  const std::lock_guard lock(generator().mutex());
  generator().set_current_seed(seed);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto data = device_allocator()->allocate(bytes);
  auto* to = data.get();
  const auto* from = storage.data();
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    Simulator::get().enqueue(current_queue(storage.device().index()),
                             {"resize storage", [=] { std::memcpy(to, from, kept); }});
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace fake_cuda
