#include "device/device_table.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "device/streams.h"

namespace fastddp {

namespace {

// Both ends of a copy.
struct Staged {
  at::Tensor on_host;  // pinned
  at::Tensor on_device;
};

// Fresh memory on both sides: neither a copy in flight nor a kernel still running sees its table change. Both come from
// caching allocators.
Staged stage(const Words& words, c10::Device device) {
  const auto count = static_cast<int64_t>(words.size());
  Staged table{at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true)),
               at::empty({count}, at::TensorOptions().dtype(at::kLong).device(device))};
  std::memcpy(table.on_host.data_ptr(), words.data(), words.size() * sizeof(int64_t));
  return table;
}

void send(const Staged& table) {
  table.on_device.copy_(table.on_host, /*non_blocking=*/true);
}

// Note [Tables of a captured graph]
// A replayed graph repeats the copy from pinned memory and the launch, with the pointers of the capture. Nobody tells when a
// graph is gone, and it may outlive the model whose step it is. So both ends of the copy live as long as the process, and serve
// nothing else. Graphs that need the same table share one: each copies the same numbers to the same place. So each set of
// addresses that was ever captured, however often, keeps 16 bytes a gradient and 32 bytes a program for good, on both sides.
const Staged& kept_for_graphs(const Words& words, c10::Device device) {
  static auto* mutex = new std::mutex();
  static auto* kept = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, Words>, Staged>();
  const std::lock_guard lock(*mutex);
  const std::tuple key{device.type(), device.index(), words};
  const auto known = kept->find(key);
  return known != kept->end() ? known->second : kept->emplace(key, stage(words, device)).first->second;
}

}  // namespace

const at::Tensor& DeviceTable::refresh(Words key, const std::function<Words()>& words) {
  const auto device = launcher_.device();
  if (is_capturing(device)) {
    const auto allowed = relaxed_capture(device);
    const auto& table = kept_for_graphs(words ? words() : key, device);
    send(table);
    launcher_.note_upload();
    of_capture_ = table.on_device;
    return of_capture_;
  }
  auto& [last, other] = sent_;
  if (key != last.key || !last.on_device.defined()) {
    std::swap(last, other);
    if (key != last.key || !last.on_device.defined()) {
      const auto table = stage(words ? words() : key, device);
      send(table);
      launcher_.note_upload();
      last = {std::move(key), table.on_device};
    }
  }
  // The table may have been made in an earlier window, on another stream.
  keep_for_current_stream(last.on_device);
  return last.on_device;
}

}  // namespace fastddp
