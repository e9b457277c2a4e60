// Devices, streams and events as c10 sees them.
#include "guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "graph.h"
#include "memory.h"

namespace fake_cuda {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::map<c10::DeviceIndex, int64_t> streams_of_thread;
thread_local bool thread_has_context = false;

constexpr int64_t kPoolStreams = 32;  // of each priority
constexpr int64_t kFirstNewStream = 1 + 2 * kPoolStreams;

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

c10::Stream stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

// An event is what was last in a stream when it was recorded.
struct Event {
  OpPtr op;
  Graph* graph = nullptr;  // that was being captured
  double milliseconds = 0;
};

std::atomic<size_t> made{0}, with_time{0};  // events

double now() {
  const std::chrono::duration<double, std::milli> since_start = std::chrono::steady_clock::now().time_since_epoch();
  return since_start.count();
}

const OpPtr& op_for_host(void* event) {
  const auto& recorded = *static_cast<Event*>(event);
  TORCH_CHECK(recorded.graph == nullptr, "cudaErrorCapturedEvent: the event was recorded during a capture");
  return recorded.op;
}

void check_not_capturing(const Queue& queue) {
  TORCH_CHECK(queue.capture == nullptr, "cudaErrorStreamCaptureUnsupported: the stream is being captured");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return Simulator::get().device_count; }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < deviceCount(), "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (index_of(device) != device_of_thread) thread_has_context = true;
    device_of_thread = index_of(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), streams_of_thread[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    static std::atomic<int64_t> taken[2];
    const auto place = taken[high_priority ? 1 : 0]++ % kPoolStreams;
    return stream(index_of(device), 1 + place + (high_priority ? kPoolStreams : 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> next = kFirstNewStream;
    return stream(index_of(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    streams_of_thread[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native_handle(stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    need_context();
    auto& queue = queue_of(stream);
    if (flag != c10::EventFlag::PYTORCH_DEFAULT) ++with_time;
    if (*event == nullptr) {
      *event = new Event();
      ++made;
    }
    const auto op = queue.capture != nullptr ? queue.capture->last(queue) : Simulator::get().last(queue);
    *static_cast<Event*>(*event) = {op, queue.capture, now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    need_context();
    const auto& [op, graph, time] = *static_cast<Event*>(event);
    auto& queue = queue_of(stream);
    if (graph != nullptr) {
      TORCH_CHECK(Graph::is_capturing(graph), "cudaErrorCapturedEvent: the event's capture has ended");
      TORCH_CHECK(queue.capture == nullptr || queue.capture == graph, "cudaErrorStreamCaptureMerge: two captures meet");
      graph->wait(queue, op);
    } else {
      TORCH_CHECK(queue.capture == nullptr,
                  "cudaErrorStreamCaptureIsolation: a captured stream waits for an event from outside of the capture");
      Simulator::get().enqueue(queue, {.name = "wait", .body = {}, .after = {op}});
    }
  }
  bool queryEvent(void* event) const override {
    check_no_capture("an event is queried");
    return event == nullptr || Simulator::get().query(op_for_host(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Simulator::get().wait_for(op_for_host(event), "an event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds;
  }

  bool queryStream(const c10::Stream& stream) const override {
    check_not_capturing(queue_of(stream));
    return Simulator::get().query(Simulator::get().last(queue_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_not_capturing(queue_of(stream));
    Simulator::get().wait_for(Simulator::get().last(queue_of(stream)), "a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Simulator::get().wait_for_device(device < 0 ? device_of_thread : device, "the device");
  }
  // Virtual since torch 2.12.
  bool isStreamCapturing(const c10::Stream& stream) const { return queue_of(stream).capture != nullptr; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    // As CUDA's allocator, which does not know memory that it has not given out, even if that is a part of some.
    if (data.get_deleter() != c10::GetAllocator(kType)->raw_deleter()) return;
    if (data.get() != nullptr) record_use(data.get(), queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::Device current_device() {
  return c10::Device(kType, device_of_thread);
}

Queue& current_queue(c10::DeviceIndex device) {
  need_context();
  return Simulator::get().queue(device, streams_of_thread[device]);
}

Queue& queue_of(const c10::Stream& stream) {
  return Simulator::get().queue(stream.device_index(), stream.id());
}

void* native_handle(const c10::Stream& stream) {
  return stream.id() == 0 ? nullptr : &queue_of(stream);
}

Queue& queue_of_handle(void* handle) {
  return handle == nullptr ? Simulator::get().queue(device_of_thread, 0) : *static_cast<Queue*>(handle);
}

std::pair<size_t, size_t> events() {
  return {made, with_time};
}

bool has_context() {
  return thread_has_context;
}

void need_context() {
  thread_has_context = true;
}

void set_context(c10::DeviceIndex device) {
  thread_has_context = device >= 0;
  if (device >= 0) device_of_thread = device;
}

}  // namespace fake_cuda
