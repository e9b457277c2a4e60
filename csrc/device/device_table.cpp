#include "device/device_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "device/cuda_driver.h"
#include "device/streams.h"

namespace fastddp {

namespace {

// In fresh memory, so that no kernel that still runs sees its table change; in the order of the current stream.
at::Tensor sent(const Words& words, Launcher& launcher) {
  const auto count = static_cast<int64_t>(words.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  launcher.note_upload();
  const auto* kernel = launcher.find("fastddp_write_words");
  at::Tensor table;
  const bool fits = kernel != nullptr && count <= kernel->tile.at(0);
  const bool is_done = fits && launched({kernel}, [&] {
                         table = at::empty({kernel->tile.at(0)}, options.device(launcher.device()));
                         launcher.write(*kernel, table, words);
                       });
  if (is_done) return table.narrow(0, 0, count);
  const auto on_host = at::empty({count}, options.pinned_memory(true));
  std::memcpy(on_host.data_ptr(), words.data(), words.size() * sizeof(int64_t));
  table = at::empty({count}, options.device(launcher.device()));
  table.copy_(on_host, /*non_blocking=*/true);
  return table;
}

c10::Stream outside_of_captures(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  constexpr int most = 64;  // the pool has 32, and gives them out in turn
  for (int i = 0; i < most; ++i) {
    const auto stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    if (!is_captured(stream)) return stream;
  }
  TORCH_CHECK(false, "fastddp: all streams of ", device, " are being captured.");
}

// Note [Tables of a captured graph]
// A replayed graph repeats its launches with the pointers of the capture. Nobody tells when a graph is gone, and it may outlive
// the model whose step it is. So a table that a captured launch reads is never written again, and lives as long as the process.
// It is sent during the capture and outside of it, and the host waits: each replay would repeat a copy that is part of the graph,
// for which a device takes several microseconds. Its memory is not the graph's either, which the graph's earlier nodes may write
// to. Graphs that need the same table share one. So each set of addresses that was ever captured, however often, keeps 16 bytes
// a gradient and 32 bytes a program for good.
const at::Tensor& kept_for_graphs(const Words& words, Launcher& launcher) {
  static auto* mutex = new std::mutex();
  static auto* kept = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, Words>, at::Tensor>();
  const std::lock_guard lock(*mutex);
  const auto device = launcher.device();
  const std::tuple key{device.type(), device.index(), words};
  const auto known = kept->find(key);
  if (known != kept->end()) return known->second;
  const auto stream = outside_of_captures(device);
  const c10::StreamGuard outside(stream);
  const auto table = sent(words, launcher);
  stream.synchronize();
  return kept->emplace(key, table).first->second;
}

}  // namespace

const at::Tensor& DeviceTable::refresh(Words key, const std::function<Words()>& words) {
  const auto device = launcher_.device();
  if (is_capturing(device)) {
    const auto allowed = relaxed_capture(device);
    return of_capture_ = kept_for_graphs(words ? words() : key, launcher_);
  }
  auto found = std::ranges::find(sent_, key, &Sent::key);
  if (found == sent_.end()) {
    const auto table = sent(words ? words() : key, launcher_);
    if (sent_.size() == kRemembered) sent_.pop_back();
    found = sent_.insert(sent_.end(), {std::move(key), table});
  }
  std::rotate(sent_.begin(), found, found + 1);
  // The table may have been made in an earlier window, on another stream.
  keep_for_current_stream(sent_.front().on_device);
  return sent_.front().on_device;
}

}  // namespace fastddp
