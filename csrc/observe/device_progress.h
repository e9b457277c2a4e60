// How far devices are with the collectives that their host has started: the host may be steps ahead.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "device/streams.h"
#include "observe/progress.h"

namespace fastddp {

// Two moments a bucket are kept, of the last windows. Nothing is asked of a device as long as its host goes on, and nothing is
// kept where computing is the host's, or while a graph is captured: its replays pass the host by.
class DeviceProgress {
 public:
  explicit DeviceProgress(std::shared_ptr<Progress> progress) : progress_(std::move(progress)) {}

  // From now on.
  void watch() { is_watched_ = true; }

  // By the thread that starts collectives. The current stream has come to the one of this bucket; or has what it brings.
  void started(size_t bucket, c10::Device device);
  void arrived(size_t bucket, c10::Device device);
  void forget();

  // By any thread: asks the device, and writes what it waits for to the page of progress.
  void look();

 private:
  struct Entry {
    size_t window, bucket;
    c10::Device device;
    Moment started;
    std::optional<Moment> arrived;
  };
  std::optional<DeviceWait> first_wait() const;

  const std::shared_ptr<Progress> progress_;
  std::atomic<bool> is_watched_{false};
  // Never held while a device is given something to do, which may take until it goes on.
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace fastddp
