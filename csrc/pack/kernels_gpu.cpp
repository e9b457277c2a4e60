// Pack and unpack on a GPU: one launch of a Triton kernel a bucket. Torch's operators move what the kernels do not take.
#include <map>

#include "pack/address_table.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

std::string to(c10::ScalarType source, c10::ScalarType target) {
  return std::string(triton_name(source)) + "_to_" + triton_name(target);
}

class GpuKernels : public Kernels {
 public:
  GpuKernels(c10::Device device, Purpose purpose) : launcher_(device, purpose) {}

  void pack(const std::vector<Slot>& slots, double scale, size_t call, LocalSums* sums) override {
    const TableWords words(slots, /*writable=*/false);
    const auto* kernel =
        find(!words.empty(), sums == nullptr ? "pack" : "pack_measuring", to(words.gradient_dtype(), words.wire_dtype()));
    const bool is_done = launched({kernel}, [&] {
      const auto tables = refresh(pack_tables_, call, words, *kernel);
      if (sums == nullptr) return launcher_.run(*kernel, tables.programs, words.wire(), tables.addresses, tables.rows, scale);
      measure_into(*sums, words, *kernel, [&](const at::Tensor& rows) {
        launcher_.run(*kernel, tables.programs, words.wire(), tables.addresses, tables.rows, scale, rows);
      });
    });
    const auto& rest = is_done ? words.rest() : slots;
    // Before gradients that live in the wire are scaled there.
    if (sums != nullptr) measure_with_operators(rest, *sums);
    pack_with_operators(rest, scale);
  }

  void measure_gradients(const std::vector<Slot>& slots, LocalSums& sums, size_t call) override {
    const TableWords words(slots, /*writable=*/false);
    const auto* kernel = find(!words.empty(), "measure_gradients", triton_name(words.gradient_dtype()));
    const bool is_done = launched({kernel}, [&] {
      const auto tables = refresh(measure_tables_, call, words, *kernel);
      measure_into(sums, words, *kernel, [&](const at::Tensor& rows) {
        launcher_.run(*kernel, tables.programs, tables.addresses, tables.rows, rows);
      });
    });
    measure_with_operators(is_done ? words.rest() : slots, sums);
  }

  at::Tensor unpack(const std::vector<Slot>& slots, bool measuring) override {
    const TableWords words(slots, /*writable=*/true);
    const auto* kernel = find(!words.empty(), "unpack", to(words.wire_dtype(), words.gradient_dtype()));
    at::Tensor partials;
    const bool is_done = launched({kernel}, [&] {
      const auto tables = refresh(unpack_tables_, 0, words, *kernel);
      if (measuring && words.rest().empty()) partials = launcher_.empty({tables.programs, 2}, at::kDouble);
      launcher_.run(*kernel, tables.programs, words.wire(), tables.addresses, tables.rows, 1.0, partials);
    });
    unpack_with_operators(is_done ? words.rest() : slots);
    return is_done ? partials : at::Tensor();
  }

  at::Tensor measure(const at::Tensor& wire) override {
    const auto* kernel = find(wire.numel() > 0, "measure", triton_name(wire.scalar_type()));
    at::Tensor partials;
    const bool is_done = launched({kernel}, [&] {
      const auto programs = (wire.numel() + kernel->tile.at(0) - 1) / kernel->tile.at(0);
      partials = launcher_.empty({programs, 2}, at::kDouble);
      launcher_.run(*kernel, programs, wire, wire.numel(), partials);
    });
    return is_done ? partials : measure_with_operators(wire);
  }

  const Launcher* launcher() const override { return &launcher_; }

 private:
  using TablesOfCalls = std::map<size_t, LaunchTables>;  // by how many calls of the same window came before

  LaunchTables::OnDevice refresh(TablesOfCalls& of_calls, size_t call, const TableWords& words, const LoadedKernel& kernel) {
    auto& tables = of_calls.try_emplace(call, launcher_).first->second;
    const auto chunks = [&] { return words.chunks(kernel.tile.at(0)); };
    return tables.refresh(words.addresses(), words.places(), chunks, TableWords::kChunkWords);
  }

  // Calls `launch` with rows that belong to `sums`, one for each program.
  template <typename Launch>
  void measure_into(LocalSums& sums, const TableWords& words, const LoadedKernel& kernel, const Launch& launch) {
    const auto rows = sums.take_rows(words.chunk_counts(kernel.tile.at(0)));
    const auto written = launcher_.instead_of(rows);
    try {
      launch(written);
    } catch (const LaunchError&) {
      sums.give_back(rows);
      throw;
    }
    Launcher::move(written, rows);
  }

  // Null also where a call has no elements. `dtypes`: one, or one "_to_" another.
  const LoadedKernel* find(bool has_elements, const std::string& form, const std::string& dtypes) const {
    return has_elements ? launcher_.find("fastddp_" + form + "_" + dtypes) : nullptr;
  }

  Launcher launcher_;
  TablesOfCalls pack_tables_, measure_tables_, unpack_tables_;
};

}  // namespace

std::unique_ptr<Kernels> make_kernels(c10::Device device, Purpose purpose) {
  if (device.is_cpu()) return make_cpu_kernels();
  if (CudaDriver::of(device.type()) == nullptr) return make_aten_kernels();
  return std::make_unique<GpuKernels>(device, purpose);
}

}  // namespace fastddp
