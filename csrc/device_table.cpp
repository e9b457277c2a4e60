#include "device_table.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <optional>

#include "streams.h"

namespace fastddp {

// Note [Tables of a captured graph]
// A graph that is replayed repeats the copy from pinned memory and the launch with the pointers of the capture: both
// ends of the copy live as long as the table, and neither is used for anything else, since between capture and replay
// nothing has been copied.
const at::Tensor& DeviceTable::refresh(Words key, const std::function<Words()>& words) {
  if (driver_.is_capturing(device_)) {
    const CudaDriver::AllowAllocation allow(driver_);
    of_capture_ = upload(words ? words() : key, /*capturing=*/true);
    return of_capture_;
  }
  if (key != key_ || !on_device_.defined()) {
    on_device_ = upload(words ? words() : key, /*capturing=*/false);
    key_ = std::move(key);
  }
  // Made in an earlier window, perhaps on another stream.
  keep_for_current_stream(on_device_);
  return on_device_;
}

// Fresh memory on both sides: neither a copy in flight nor a kernel still running sees its table change. Both come from
// caching allocators.
at::Tensor DeviceTable::upload(const Words& words, bool capturing) {
  const auto count = static_cast<int64_t>(words.size());
  const auto staged = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  std::memcpy(staged.data_ptr(), words.data(), words.size() * sizeof(int64_t));
  const auto on_device = at::empty({count}, at::TensorOptions().dtype(at::kLong).device(device_));
  on_device.copy_(staged, /*non_blocking=*/true);
  if (capturing) kept_.insert(kept_.end(), {staged, on_device});
  ++uploads_;
  return on_device;
}

}  // namespace fastddp
