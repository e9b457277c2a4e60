// How far devices are with the collectives that their host has started: the host may be steps ahead.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "device/streams.h"
#include "observe/progress.h"

namespace fastddp {

// Keeps two moments a bucket, of the last windows. It asks a device nothing as long as the host goes on. It keeps nothing where
// the host computes, or while a graph is captured: the graph's replays pass the host by.
class DeviceProgress {
 public:
  explicit DeviceProgress(std::shared_ptr<Progress> progress) : progress_(std::move(progress)) {}

  // Keeps moments from now on.
  void watch() { is_watched_ = true; }

  // For the thread that starts collectives. The device's current stream has come to a bucket's collective, or has its result.
  void happened(const Moment& moment, c10::Device device) {
    if (is_watched_) note(moment, device);
  }

  // For any thread: asks the devices, and writes what they wait for to the page of progress.
  void look() { progress_->device_waits(first_wait()); }

 private:
  struct Entry {
    size_t window, bucket;
    bool of_parameters;  // not of its gradients
    c10::Device device;
    DeviceMoment started;
    std::optional<DeviceMoment> arrived;
  };
  void note(const Moment& moment, c10::Device device);
  std::optional<DeviceWait> first_wait() const;

  const std::shared_ptr<Progress> progress_;
  std::atomic<bool> is_watched_{false};
  // Never held while a device is given work: that may block until the device goes on.
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace fastddp
