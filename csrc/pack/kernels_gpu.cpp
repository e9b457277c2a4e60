// Pack and unpack on a GPU: one launch of a Triton kernel a bucket. Torch's operators move what the kernels do not take.
#include <ATen/ops/view_as_real.h>

#include "device/scratch.h"
#include "pack/address_table.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

std::string name_of(const char* form, c10::ScalarType source, c10::ScalarType target) {
  return std::string("fastddp_") + form + "_" + triton_name(source) + "_to_" + triton_name(target);
}

at::Tensor measured(const at::Tensor& values) {
  return measure_with_operators(values.is_complex() ? at::view_as_real(values) : values);
}

// Writes each gradient's sums to its rows, of which there are `counts`, in the gradients' order.
void write_measured(const std::vector<Slot>& slots, const Words& counts, const at::Tensor& rows) {
  int64_t next = 0;
  size_t of_next = 0;
  for (const auto& [gradient, view, member] : slots) {
    if (view.numel() == 0) continue;
    const auto count = counts[of_next++];
    const auto own = rows.narrow(0, next, count);
    gradient.defined() ? write_sums(measured(gradient), own) : static_cast<void>(own.zero_());
    next += count;
  }
}

// The slots of one call, split into those that a kernel takes and the rest.
struct Split {
  TableWords words;
  std::vector<size_t> members;  // of the slots that have rows in the tables
  std::vector<Slot> rest;

  Split(const std::vector<Slot>& slots, bool writable) {
    for (const auto& slot : slots) {
      if (!words.add(slot, writable)) {
        rest.push_back(slot);
      } else if (slot.view.numel() > 0) {
        members.push_back(slot.member);
      }
    }
  }

  // The slots that a kernel takes, for operators that do its work.
  static std::vector<Slot> taken(const std::vector<Slot>& slots, bool writable) {
    TableWords words;
    std::vector<Slot> result;
    for (const auto& slot : slots) {
      if (words.add(slot, writable)) result.push_back(slot);
    }
    return result;
  }

  // A row for each program of a launch.
  at::Tensor take_rows(LocalSums& sums, int64_t chunk_elements) const {
    const auto counts = words.chunk_counts(chunk_elements);
    std::vector<std::pair<size_t, int64_t>> rows;
    for (size_t i = 0; i < members.size(); ++i) rows.emplace_back(members[i], counts[i]);
    return sums.take_rows(rows);
  }
};

class GpuKernels : public Kernels {
 public:
  GpuKernels(c10::Device device, const CudaDriver& driver, Purpose purpose)
      : device_(device),
        driver_(driver),
        purpose_(purpose),
        unpack_table_(device, driver),
        launcher_(device, driver),
        scratch_(device, purpose) {}

  void pack(const std::vector<Slot>& slots, double scale, size_t call, LocalSums* sums) override {
    const Split split(slots, /*writable=*/false);
    const auto& words = split.words;
    const auto* form = sums == nullptr ? "pack" : "pack_measuring";
    const auto* kernel = find(words, name_of(form, words.gradient_dtype(), words.wire_dtype()));
    if (kernel == nullptr) return otherwise_->pack(slots, scale, call, sums);
    while (pack_tables_.size() <= call) pack_tables_.emplace_back(device_, driver_);
    const auto tables = pack_tables_[call].refresh(words, kernel->tile.at(0));
    const auto* addresses = tables.addresses.const_data_ptr();
    const auto* chunks = tables.chunks.const_data_ptr();
    const auto rows = sums == nullptr ? at::Tensor() : split.take_rows(*sums, kernel->tile.at(0));
    launch_or_else(
        {kernel},
        [&] {
          if (rows.defined()) {
            const auto partials = scratch_.instead_of(rows);
            launcher_.run(*kernel, tables.programs, words.wire(), addresses, chunks, scale, partials.const_data_ptr());
            Scratch::move(partials, rows);
          } else {
            launcher_.run(*kernel, tables.programs, words.wire(), addresses, chunks, scale);
          }
        },
        [&] {
          const auto taken = Split::taken(slots, /*writable=*/false);
          if (rows.defined()) write_measured(taken, words.chunk_counts(kernel->tile.at(0)), rows);
          pack_with_operators(taken, scale);
        });
    // Before gradients that live in the wire are scaled there.
    if (sums != nullptr) measure_with_operators(split.rest, *sums);
    pack_with_operators(split.rest, scale);
  }

  void measure_gradients(const std::vector<Slot>& slots, LocalSums& sums, size_t call) override {
    const Split split(slots, /*writable=*/false);
    const auto& words = split.words;
    const auto* kernel = find(words, std::string("fastddp_measure_gradients_") + triton_name(words.gradient_dtype()));
    if (kernel == nullptr) return measure_with_operators(slots, sums);
    while (measure_tables_.size() <= call) measure_tables_.emplace_back(device_, driver_);
    const auto tables = measure_tables_[call].refresh(words, kernel->tile.at(0));
    const auto rows = split.take_rows(sums, kernel->tile.at(0));
    launch_or_else(
        {kernel},
        [&] {
          const auto partials = scratch_.instead_of(rows);
          launcher_.run(*kernel, tables.programs, tables.addresses.const_data_ptr(), tables.chunks.const_data_ptr(),
                        partials.const_data_ptr());
          Scratch::move(partials, rows);
        },
        [&] { write_measured(Split::taken(slots, /*writable=*/false), words.chunk_counts(kernel->tile.at(0)), rows); });
    measure_with_operators(split.rest, sums);
  }

  at::Tensor unpack(const std::vector<Slot>& slots, bool measuring) override {
    const Split split(slots, /*writable=*/true);
    const auto& words = split.words;
    const auto* kernel = find(words, name_of("unpack", words.wire_dtype(), words.gradient_dtype()));
    if (kernel == nullptr) {
      unpack_with_operators(slots);
      return {};
    }
    const auto tables = unpack_table_.refresh(words, kernel->tile.at(0));
    at::Tensor partials;
    if (measuring && split.rest.empty()) partials = scratch_.empty({tables.programs, 2}, at::kDouble);
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, tables.programs, words.wire(), tables.addresses.const_data_ptr(),
                        tables.chunks.const_data_ptr(), 1.0, partials.defined() ? partials.const_data_ptr() : nullptr);
        },
        [&] {
          const auto taken = Split::taken(slots, /*writable=*/true);
          unpack_with_operators(taken);
          if (partials.defined()) write_measured(taken, words.chunk_counts(kernel->tile.at(0)), partials);
        });
    unpack_with_operators(split.rest);
    return partials;
  }

  at::Tensor measure(const at::Tensor& wire) override {
    const auto* kernel = find_kernel(device_, std::string("fastddp_measure_") + triton_name(wire.scalar_type()), purpose_);
    if (kernel == nullptr || wire.numel() == 0) return measure_with_operators(wire);
    const auto programs = (wire.numel() + kernel->tile.at(0) - 1) / kernel->tile.at(0);
    const auto partials = scratch_.empty({programs, 2}, at::kDouble);
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, static_cast<unsigned>(programs), wire.const_data_ptr(), wire.numel(),
                        partials.const_data_ptr());
        },
        [&] { write_sums(measure_with_operators(wire), partials); });
    return partials;
  }

  size_t launches() const override { return launcher_.launches(); }

  size_t uploads() const override {
    auto uploads = unpack_table_.uploads();
    for (const auto& table : pack_tables_) uploads += table.uploads();
    for (const auto& table : measure_tables_) uploads += table.uploads();
    return uploads;
  }

  bool wrote_around() const override { return scratch_.wrote_around(); }

 private:
  const LoadedKernel* find(const TableWords& words, const std::string& name) const {
    return words.empty() ? nullptr : find_kernel(device_, name, purpose_);
  }

  const c10::Device device_;
  const CudaDriver& driver_;
  const Purpose purpose_;
  // A table for each call of pack and of measure_gradients in a window. Unpack has its own, since it runs on another stream.
  std::vector<AddressTable> pack_tables_;
  std::vector<AddressTable> measure_tables_;
  AddressTable unpack_table_;
  Launcher launcher_;
  Scratch scratch_;
  const std::unique_ptr<Kernels> otherwise_ = make_aten_kernels();
};

}  // namespace

std::unique_ptr<Kernels> make_gpu_kernels(c10::Device device, Purpose purpose) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device, ":0'");
  return std::make_unique<GpuKernels>(device, *CudaDriver::of(device.type()), purpose);
}

std::unique_ptr<Kernels> make_kernels(c10::Device device, Purpose purpose) {
  if (device.is_cpu()) return make_cpu_kernels();
  return CudaDriver::of(device.type()) != nullptr ? make_gpu_kernels(device, purpose) : make_aten_kernels();
}

}  // namespace fastddp
