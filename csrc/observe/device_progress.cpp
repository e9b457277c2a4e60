#include "observe/device_progress.h"

#include <algorithm>

#include "device/cuda_driver.h"

namespace fastddp {
namespace {
constexpr size_t kWindows = 8;  // more than a host is ahead of its device
}

void DeviceProgress::note(const Moment& moment, c10::Device device) {
  const bool starts = moment.what == What::started || moment.what == What::sent;
  const bool arrives = moment.what == What::finished || moment.what == What::gathered;
  const bool of_parameters = moment.what == What::sent || moment.what == What::gathered;
  if (moment.what == What::fails) {
    const std::lock_guard lock(mutex_);
    entries_.clear();
  }
  if ((!starts && !arrives) || !has_streams(device) || is_capturing(device)) return;
  auto now = DeviceMoment::without_time(device);
  const std::lock_guard lock(mutex_);
  if (starts) {
    const auto window = progress_->windows() + 1;
    while (!entries_.empty() && entries_.front().window + kWindows <= window) entries_.pop_front();
    entries_.push_back({window, *moment.bucket, of_parameters, device, std::move(now), std::nullopt});
    return;
  }
  const auto of = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
    return entry.bucket == *moment.bucket && entry.of_parameters == of_parameters;
  });
  if (of != entries_.rend() && !of->arrived) of->arrived = std::move(now);
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
