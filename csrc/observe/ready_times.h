// When gradients became ready, for planning buckets by it. Off unless asked for, since on a GPU it takes an event a gradient.
#pragma once

#include <optional>
#include <vector>

#include "device/streams.h"

namespace fastddp {

class ReadyTimes {
 public:
  explicit ReadyTimes(const std::vector<at::Tensor>& parameters);

  // Starts or stops, and drops the times taken before. A forward that is about to run begins now.
  void record(bool recording);

  // A forward that opens a window begins. An earlier window that did not end well is forgotten.
  void begin_window();
  // A parameter's gradient is final. The last call counts.
  void note(size_t parameter) {
    if (window_) window_->ready[parameter] = Moment::now(devices_[device_of_[parameter]]);
  }
  // The window has ended well.
  void end_window() {
    if (!window_) return;
    ended_.push_back(*std::exchange(window_, std::nullopt));
  }

  // For each window, by parameter: seconds from the beginning of its forward; NaN if no gradient came. The host waits for the
  // device.
  std::vector<std::vector<double>> seconds() const;

 private:
  struct Window {
    std::vector<Moment> begins;                // by device
    std::vector<std::optional<Moment>> ready;  // by parameter
  };

  std::vector<c10::Device> devices_;
  std::vector<size_t> device_of_;  // by parameter
  bool recording_ = false;
  std::optional<Window> window_;
  std::vector<Window> ended_;
};

}  // namespace fastddp
