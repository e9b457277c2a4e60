// Every wait of one stream for another that fastddp makes is a function in this file.
//
// Built on c10's device-agnostic guards and events, so that the extension compiles without CUDA headers. Devices that
// compute on the host (CPU) have no streams: for them c10 has no events either, and every function here does nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace fastddp {

inline bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

// Note [Producers]
// AccumulateGrad runs on the stream that was current when its node was made, so the gradients of one bucket may come
// from several streams. Each gradient hook notes the stream it runs on; pack then runs on the stream of the gradient
// that completed the bucket, after it was made to wait for all the others.
class Producers {
 public:
  void note(c10::Device device) {
    if (!has_streams(device)) return;
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  }

  // Makes the current stream wait for everything that the producers have been given up to now.
  void current_stream_waits(c10::Device device) const {
    if (!has_streams(device)) return;
    const auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    for (const auto& producer : streams_) {
      if (producer == current) continue;
      c10::Event gradients_written(device.type());
      gradients_written.record(producer);
      gradients_written.block(current);
    }
  }

  // Keeps the memory of a gradient that the current stream reads from being given out again, once it is freed, by the
  // stream that it was allocated on.
  void keep_for_current_stream(const at::Tensor& gradient) const {
    if (streams_.size() < 2 || !gradient.defined()) return;
    const c10::impl::VirtualGuardImpl guard(gradient.device().type());
    guard.recordDataPtrOnStream(gradient.storage().data_ptr(), guard.getStream(gradient.device()));
  }

  void clear() {
    streams_.clear();
  }

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace fastddp
