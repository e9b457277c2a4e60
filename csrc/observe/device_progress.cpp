#include "observe/device_progress.h"

#include <algorithm>

#include "device/cuda_driver.h"

namespace fastddp {
namespace {
constexpr size_t kWindows = 8;  // more than a host is ahead of its device
}

void DeviceProgress::started(size_t bucket, c10::Device device, bool of_parameters) {
  if (!is_watched_ || !has_streams(device) || is_capturing(device)) return;
  const auto window = progress_->pulse().windows + 1;
  Entry entry{window, bucket, of_parameters, device, Moment::without_time(device), std::nullopt};
  const std::lock_guard lock(mutex_);
  while (!entries_.empty() && entries_.front().window + kWindows <= entry.window) entries_.pop_front();
  entries_.push_back(std::move(entry));
}

void DeviceProgress::arrived(size_t bucket, c10::Device device, bool of_parameters) {
  if (!is_watched_ || !has_streams(device) || is_capturing(device)) return;
  auto moment = Moment::without_time(device);
  const std::lock_guard lock(mutex_);
  const auto of = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
    return entry.bucket == bucket && entry.of_parameters == of_parameters;
  });
  if (of != entries_.rend() && !of->arrived) of->arrived = std::move(moment);
}

// Leaves out buckets that the host has not finished: the host itself reports those.
std::optional<DeviceWait> DeviceProgress::first_wait() const {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_) {
    const auto allowed = relaxed_capture(entry.device);
    if (!entry.arrived) continue;
    const bool has_begun = entry.started.has_passed();
    if (!has_begun || !entry.arrived->has_passed()) {
      return DeviceWait{entry.window, entry.bucket, has_begun, entry.of_parameters};
    }
  }
  return std::nullopt;
}

}  // namespace fastddp
