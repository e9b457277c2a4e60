#include "guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace fake_cuda {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::map<c10::DeviceIndex, int64_t> streams_of_thread;

c10::Stream stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

struct Event {
  OpPtr op;
  double time = 0;
  bool captured = false;
};

double now() {
  const std::chrono::duration<double, std::milli> since_start = std::chrono::steady_clock::now().time_since_epoch();
  return since_start.count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return current_device();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "there is no device ", device);
    if (device.has_index()) device_of_thread = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : device_of_thread;
    return stream(index, streams_of_thread[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.has_index() ? device.index() : device_of_thread, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device.has_index() ? device.index() : device_of_thread, Simulator::get().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    streams_of_thread[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return Simulator::get().device_count;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const std::lock_guard lock(Simulator::get().mutex());
    if (*event == nullptr) *event = new Event();
    const auto& queue = queue_of(stream);
    *static_cast<Event*>(*event) = {queue.capturing ? queue.last_captured : queue.last, now(), queue.capturing};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto& recorded = *static_cast<Event*>(event);
    Simulator::get().block(queue_of(stream), recorded.op, recorded.captured);
  }
  bool queryEvent(void* event) const override {
    const std::lock_guard lock(Simulator::get().mutex());
    Simulator::get().check_no_capture("an event is queried");
    const auto op = event == nullptr ? nullptr : static_cast<Event*>(event)->op;
    return op == nullptr || op->done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Simulator::get().wait_for(static_cast<Event*>(event)->op, "an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
  }

  bool queryStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(Simulator::get().mutex());
    return queue_of(stream).pending.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Simulator::get().wait_for(queue_of(stream).last, "a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Simulator::get().wait_for_everything("the device");
  }
  // Virtual since torch 2.12.
  bool isStreamCapturing(const c10::Stream& stream) const {
    return queue_of(stream).capturing;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) record_use(data.get(), queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::Device current_device() {
  return c10::Device(kType, device_of_thread);
}

Queue& current_queue(c10::DeviceIndex device) {
  return Simulator::get().queue(device, streams_of_thread[device]);
}

Queue& queue_of(const c10::Stream& stream) {
  return Simulator::get().queue(stream.device_index(), stream.id());
}

}  // namespace fake_cuda
