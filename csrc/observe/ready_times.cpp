#include "observe/ready_times.h"

#include <algorithm>
#include <limits>

namespace fastddp {

ReadyTimes::ReadyTimes(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    const auto known = std::ranges::find(devices_, parameter.device());
    device_of_.push_back(known - devices_.begin());
    if (known == devices_.end()) devices_.push_back(parameter.device());
  }
}

void ReadyTimes::record(bool recording) {
  recording_ = recording;
  window_.reset();
  ended_.clear();
  begin_window();
}

void ReadyTimes::begin_window() {
  if (!recording_) return;
  window_.emplace();
  window_->ready.resize(device_of_.size());
  for (const auto& device : devices_) window_->begins.push_back(Moment::now(device));
}

std::vector<std::vector<double>> ReadyTimes::seconds() const {
  std::vector<std::vector<double>> windows;
  for (const auto& window : ended_) {
    auto& seconds = windows.emplace_back(device_of_.size(), std::numeric_limits<double>::quiet_NaN());
    for (size_t parameter = 0; parameter < device_of_.size(); ++parameter) {
      const auto& ready = window.ready[parameter];
      if (ready) seconds[parameter] = ready->seconds_since(window.begins[device_of_[parameter]]);
    }
  }
  return windows;
}

}  // namespace fastddp
