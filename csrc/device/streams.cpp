#include "device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "device/cuda_driver.h"
#include "device/memory_part.h"

namespace fastddp {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Note [Events are used again]
// Making or destroying an event is a driver call, and a step takes several events a bucket. So events are kept, by device and
// kind. Whoever takes one records it before anything else. A stream that was told to wait for an event waits for what was
// recorded at that time, so the event may be recorded again at once. Events recorded in a capture are not kept: nobody may query
// them afterwards.
class EventPool {
 public:
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, c10::EventFlag>;

  struct GiveBack {
    std::optional<Key> key;  // none: the event is not kept
    void operator()(c10::Event* event) const {
      std::unique_ptr<c10::Event> owned(event);
      if (key) pool().put(*key, std::move(owned));
    }
  };
  using Taken = std::unique_ptr<c10::Event, GiveBack>;

  // An event recorded in the stream.
  static Taken recorded_in(const c10::Stream& stream, c10::EventFlag flag) {
    const auto device = stream.device();
    const bool is_kept = !is_captured(stream);
    const Key key{device.type(), device.index(), flag};
    Taken event(is_kept ? pool().take(key) : new c10::Event(device.type(), flag),
                GiveBack{is_kept ? std::optional(key) : std::nullopt});
    event->record(stream);
    return event;
  }

 private:
  static EventPool& pool() {
    static auto& events = *new EventPool();  // Note [Never destroyed]
    return events;
  }

  c10::Event* take(const Key& key) {
    const std::lock_guard lock(mutex_);
    auto& events = free_[key];
    if (events.empty()) return new c10::Event(std::get<0>(key), std::get<2>(key));
    auto* event = events.back().release();
    events.pop_back();
    return event;
  }

  void put(const Key& key, std::unique_ptr<c10::Event> event) {
    const std::lock_guard lock(mutex_);
    free_[key].push_back(std::move(event));
  }

  std::mutex mutex_;
  std::map<Key, std::vector<std::unique_ptr<c10::Event>>> free_;
};

constexpr auto kWithoutTime = c10::EventFlag::PYTORCH_DEFAULT;
constexpr auto kWithTime = c10::EventFlag::BACKEND_DEFAULT;

void wait(const c10::Stream& waiting, const c10::Stream& awaited) {
  if (waiting == awaited) return;
  EventPool::recorded_in(awaited, kWithoutTime)->block(waiting);
}

void keep(const c10::Storage& memory, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(allocated(memory), stream);
}

}  // namespace

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

void Producers::note(c10::Device device) {
  if (!has_streams(device)) return;
  const auto stream = current_stream(device);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void Producers::current_stream_waits(c10::Device device) const {
  for (const auto& producer : streams_) wait(current_stream(device), producer);
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || !has_streams(tensor.device())) return;
  keep(tensor.storage(), current_stream(tensor.device()));
}

void KeptUntilJoin::add(const at::Tensor& tensor) {
  if (!tensor.defined() || !has_streams(tensor.device())) return;
  uses_.push_back({tensor.storage(), current_stream(tensor.device())});
}

void KeptUntilJoin::release_after_join() {
  for (const auto& [memory, by] : uses_) keep(memory, current_stream(by.device()));
  uses_.clear();
}

void KeptUntilJoin::let_go() {
  for (const auto& [memory, by] : uses_) keep(memory, by);
  uses_.clear();
}

void SideStreams::add(c10::Device device) {
  if (!has_streams(device)) return;
  const auto known = [&](const c10::Stream& stream) { return stream.device() == device; };
  if (std::ranges::any_of(streams_, known)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  // High priority: these short kernels, for which the next optimizer step waits, go before backward's long ones.
  streams_.push_back(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
}

c10::MultiStreamGuard SideStreams::make_current() const {
  return c10::MultiStreamGuard(streams_);
}

void SideStreams::wait_for_current_streams() const {
  for (const auto& side : streams_) wait(side, current_stream(side.device()));
}

void SideStreams::current_streams_wait() const {
  for (const auto& side : streams_) wait(current_stream(side.device()), side);
}

void SideStreams::synchronize() const {
  for (const auto& side : streams_) side.synchronize();
}

DeviceMoment::DeviceMoment(c10::Device device, bool has_time) : device_(device), time_(std::chrono::steady_clock::now()) {
  if (has_streams(device)) event_ = EventPool::recorded_in(current_stream(device), has_time ? kWithTime : kWithoutTime);
}

DeviceMoment DeviceMoment::now(c10::Device device) {
  return {device, true};
}

DeviceMoment DeviceMoment::without_time(c10::Device device) {
  return {device, false};
}

double DeviceMoment::seconds_since(const DeviceMoment& earlier) const {
  if (!event_) return std::chrono::duration<double>(time_ - earlier.time_).count();
  earlier.event_->synchronize();
  event_->synchronize();
  return 1e-3 * earlier.event_->elapsedTime(*event_);
}

// Without the guard, a thread's first call would make a context on the first device.
bool DeviceMoment::has_passed() const {
  if (!event_) return true;
  const c10::DeviceGuard on_its_device(device_);
  return event_->query();
}

}  // namespace fastddp
