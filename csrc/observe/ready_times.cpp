#include "observe/ready_times.h"

#include <limits>

namespace fastddp {

void ReadyTimes::record(bool recording) {
  recording_ = recording;
  window_.reset();
  ended_.clear();
  happened(What::opens);
}

// A window that did not end well is forgotten when the next one opens. One over the same forward opens with its first gradient.
void ReadyTimes::happened(What what) {
  if (what == What::ends && window_) ended_.push_back(*std::exchange(window_, std::nullopt));
  const bool opens = what == What::opens || (what == What::reduces && !window_);
  if (!recording_ || !opens) return;
  window_.emplace().ready.resize(devices_.size());
  for (const auto& device : devices_) {
    if (!window_->begins.contains(device)) window_->begins.emplace(device, DeviceMoment::now(device));
  }
}

std::vector<std::vector<double>> ReadyTimes::seconds() const {
  std::vector<std::vector<double>> windows;
  for (const auto& window : ended_) {
    auto& seconds = windows.emplace_back(devices_.size(), std::numeric_limits<double>::quiet_NaN());
    for (size_t parameter = 0; parameter < devices_.size(); ++parameter) {
      const auto& ready = window.ready[parameter];
      if (ready) seconds[parameter] = ready->seconds_since(window.begins.at(devices_[parameter]));
    }
  }
  return windows;
}

}  // namespace fastddp
