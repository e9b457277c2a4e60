// What an exchange of one bucket takes, without a model.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bucket/buckets.h"
#include "device/streams.h"
#include "pipeline/exchange.h"

namespace fastddp {

// Codec and transport together, as a window uses them: from the moment in which all gradients are there to that in which they
// are averaged. Nothing else runs beside.
class Trial {
 public:
  // `parameters`: what stands in for those of the bucket, on one device. Their values are its gradients.
  Trial(std::vector<at::Tensor> parameters, std::shared_ptr<Exchange> exchange);

  // Of one window, which all ranks of the exchange begin together. On a device with streams it is the device's time, the mean
  // of several windows behind each other, for which the host waits.
  double seconds();

  // What the last one has left.
  std::vector<at::Tensor> gradients() const;

 private:
  struct Window {
    Moment begin, end;
  };
  Window exchange_gradients();

  std::mutex mutex_;
  Buckets buckets_;
  const std::shared_ptr<Exchange> exchange_;
  double host_seconds_ = 0;  // for which the host started what was measured last
};

}  // namespace fastddp
