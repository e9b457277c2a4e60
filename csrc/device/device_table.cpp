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

// In the order of the current stream. `memory`: earlier tables' that only this stream has used; taken if it is large enough.
at::Tensor sent(const Words& words, Launcher& launcher, const at::Tensor& memory = {}) {
  const auto count = static_cast<int64_t>(words.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto take = [&](int64_t most) {
    if (memory.defined() && memory.numel() >= most) return memory;
    return at::empty({most}, options.device(launcher.device()));
  };
  launcher.note_upload();
  const auto* kernel = launcher.find("fastddp_write_words");
  at::Tensor table;
  const bool fits = kernel != nullptr && count <= kernel->tile.at(0);
  const bool is_done = fits && launched({kernel}, [&] {
                         const auto together = kernel->tile.at(1);
                         table = take((count + together - 1) / together * together);
                         launcher.write(*kernel, table, words);
                       });
  if (is_done) return table;
  const auto on_host = at::empty({count}, options.pinned_memory(true));
  std::memcpy(on_host.data_ptr(), words.data(), words.size() * sizeof(int64_t));
  table = take(count);
  table.narrow(0, 0, count).copy_(on_host, /*non_blocking=*/true);
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
  const auto table = sent(words, launcher).narrow(0, 0, std::ssize(words));
  stream.synchronize();
  return kept->emplace(key, table).first->second;
}

}  // namespace

// Note [Tables keep their memory]
// An allocator gives a table's memory from where small gradients get theirs. If each new table were allocated in the middle of
// backward and an old one freed, these gradients would get other addresses in the next step, for which a new table would be sent:
// for ever. So tables of addresses, those without `words`, get memory for kRemembered of them at once. The one that is forgotten
// leaves its memory to the new one, which is written in the order of the stream that has read it. Under another stream the new
// table has memory of its own.
const at::Tensor& DeviceTable::refresh(Words key, const std::function<Words()>& words) {
  const auto device = launcher_.device();
  if (is_capturing(device)) {
    const auto allowed = relaxed_capture(device);
    return of_capture_ = kept_for_graphs(words ? words() : key, launcher_);
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (sent_.empty() && !words) {
    constexpr int64_t together = 32;  // so that each has room for whole groups of words
    const auto room = (std::ssize(key) + together - 1) / together * together;
    const auto options = at::TensorOptions().dtype(at::kLong).device(device);
    const auto all = at::empty({static_cast<int64_t>(kRemembered), room}, options);
    for (const auto& memory : all.unbind()) sent_.push_back({{}, memory, memory, stream});
  }
  auto found = std::ranges::find(sent_, key, &Sent::key);
  if (found == sent_.end()) {
    Sent oldest;
    if (sent_.size() == kRemembered) oldest = std::move(sent_.back()), sent_.pop_back();
    const auto table = words ? words() : key;
    const auto memory = sent(table, launcher_, oldest.stream == stream ? oldest.memory : at::Tensor());
    found = sent_.insert(sent_.end(), {std::move(key), memory, memory.narrow(0, 0, std::ssize(table)), stream});
  }
  std::rotate(sent_.begin(), found, found + 1);
  auto& front = sent_.front();
  if (front.stream != stream) front.stream.reset();
  keep_for_current_stream(front.on_device);
  return front.on_device;
}

}  // namespace fastddp
