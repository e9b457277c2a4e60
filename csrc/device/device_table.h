// A table of numbers for kernels. It is kept on the device, and sent there when it has changed: as the parameters of a kernel that
// writes it, or, if it has too many words for that, from pinned memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "device/launcher.h"

namespace fastddp {

using Words = std::vector<int64_t>;

class DeviceTable {
 public:
  explicit DeviceTable(Launcher& launcher) : launcher_(launcher) {}

  // The table on the device, in the order of the current stream. `words` makes it from what `key` decides, and is called when
  // `key` is none of the last kRemembered, or in a capture. So nothing is sent in a steady state, also where buffers change
  // places in each step, or an allocator gives gradients the same memory every few steps. Without `words`, the key is the table.
  const at::Tensor& refresh(Words key, const std::function<Words()>& words = {});

 private:
  Launcher& launcher_;
  struct Sent {
    Words key;
    at::Tensor memory;
    at::Tensor on_device;               // the part of it that is the table
    std::optional<c10::Stream> stream;  // the one that has used it; none: several
  };
  static constexpr size_t kRemembered = 8;
  std::vector<Sent> sent_;  // the last one first
  at::Tensor of_capture_;
};

// The two tables of one kind of launch. Each kind has its own, since they run on different streams.
class LaunchTables {
 public:
  explicit LaunchTables(Launcher& launcher) : addresses_(launcher), rows_(launcher) {}

  struct OnDevice {
    at::Tensor addresses;  // of tensors, with what else the kernel has to know of each
    at::Tensor rows;       // one for each program: which part of the tensors it works on
    int64_t programs;
  };
  // As DeviceTable::refresh(). `rows` depends on `shapes` alone.
  OnDevice refresh(Words addresses, Words shapes, const std::function<Words()>& rows, int64_t words_a_row) {
    const auto& on_device = rows_.refresh(std::move(shapes), rows);
    return {addresses_.refresh(std::move(addresses)), on_device, on_device.numel() / words_a_row};
  }

 private:
  DeviceTable addresses_;
  DeviceTable rows_;
};

}  // namespace fastddp
