// When gradients became ready: for whoever plans buckets by it. Off unless asked for, since on a GPU it is an event a gradient.
#pragma once

#include <optional>
#include <vector>

#include "device/streams.h"

namespace fastddp {

class ReadyTimes {
 public:
  explicit ReadyTimes(const std::vector<at::Tensor>& parameters);

  // From now on, or not any more; what was taken before is dropped. A forward that is about to run begins now.
  void take(bool taking);

  // A forward that opens a window begins; a window that was begun before and did not end well is forgotten.
  void begin_window();
  // The gradient of a parameter is final; the last time counts.
  void note(size_t parameter);
  // The window has ended well.
  void end_window();

  // Of each window, by parameter: seconds from the beginning of its forward; NaN where no gradient came. The host waits
  // for the device.
  std::vector<std::vector<double>> seconds() const;
  // Of each window: seconds from the beginning of its forward until all gradients are averaged. The host waits as well.
  std::vector<double> window_seconds() const;

 private:
  struct Window {
    std::vector<Moment> begins;                // by device
    std::vector<std::optional<Moment>> ready;  // by parameter
    std::optional<Moment> end;                 // of the first device; none: it has not ended
  };

  std::vector<c10::Device> devices_;
  std::vector<size_t> device_of_;  // by parameter
  bool taking_ = false;
  std::optional<Window> window_;
  std::vector<Window> ended_;
};

}  // namespace fastddp
