#include "device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "device/memory_part.h"

namespace fastddp {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait(const c10::Stream& waiting, const c10::Stream& awaited) {
  if (waiting == awaited) return;
  c10::Event event(awaited.device_type());
  event.record(awaited);
  event.block(waiting);
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

void Producers::clear() {
  streams_.clear();
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
  // Of high priority: a short kernel that the next optimizer step waits for goes before backward's long ones.
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

Moment Moment::now(c10::Device device) {
  Moment moment;
  moment.time_ = std::chrono::steady_clock::now();
  moment.device_ = device;
  if (!has_streams(device)) return moment;
  // BACKEND_DEFAULT: an event that knows its time.
  moment.event_ = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  moment.event_->record(current_stream(device));
  return moment;
}

double Moment::seconds_since(const Moment& earlier) const {
  if (!event_) return std::chrono::duration<double>(time_ - earlier.time_).count();
  earlier.event_->synchronize();
  event_->synchronize();
  return 1e-3 * earlier.event_->elapsedTime(*event_);
}

// A thread that has asked nothing yet would make a context on the first device.
bool Moment::has_passed() const {
  if (!event_) return true;
  const c10::DeviceGuard on_its_device(device_);
  return event_->query();
}

}  // namespace fastddp
