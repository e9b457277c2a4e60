// When gradients became ready, for planning buckets by it. Off unless asked for, since on a GPU it takes an event a gradient.
#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "pages/snapshot.h"

namespace fastddp {

class ReadyTimes {
 public:
  explicit ReadyTimes(const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) devices_.push_back(parameter.device());
  }

  // Starts or stops, and drops the times taken before. A forward that is about to run begins now.
  void record(bool recording);
  void happened(What what);
  // A parameter's gradient is final. The last call counts.
  void gradient(size_t parameter) {
    if (window_) window_->ready[parameter] = DeviceMoment::now(devices_[parameter]);
  }

  // For each window that has ended well, by parameter: seconds from the beginning of its forward; NaN if no gradient came. The
  // host waits for the device.
  std::vector<std::vector<double>> seconds() const;

 private:
  struct Window {
    std::unordered_map<c10::Device, DeviceMoment> begins;
    std::vector<std::optional<DeviceMoment>> ready;  // by parameter
  };

  std::vector<c10::Device> devices_;  // by parameter
  bool recording_ = false;
  std::optional<Window> window_;
  std::vector<Window> ended_;
};

}  // namespace fastddp
