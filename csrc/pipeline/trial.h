// Measures how long an exchange of one bucket takes, without a model.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bucket/buckets.h"
#include "device/streams.h"
#include "pipeline/exchange.h"

namespace fastddp {

// Runs codec and transport as a window does: from the moment when all gradients have come until they are averaged. Nothing
// else runs at the same time.
class Trial {
 public:
  // `parameters`: stand in for the bucket's parameters, on one device. Their values are its gradients.
  Trial(std::vector<at::Tensor> parameters, std::shared_ptr<Exchange> exchange);

  // The time of one window, which all ranks of the exchange begin together. On a device with streams it is the device's time,
  // the mean of several windows in a row, and the host waits for them.
  double seconds();

  // The gradients after the last window.
  std::vector<at::Tensor> gradients() const;

 private:
  struct Window {
    Moment begin, end;
  };
  Window exchange_gradients();

  std::mutex mutex_;
  Buckets buckets_;
  const std::shared_ptr<Exchange> exchange_;
  double host_seconds_ = 0;  // how long the host took to start the last measured windows
};

}  // namespace fastddp
