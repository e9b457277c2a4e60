// Block8 on a GPU: launches the Triton kernels of kernels/block8_kernels.py, once for all gradients of a call. torch's
// operators do what these kernels cannot.
#include <algorithm>
#include <bit>
#include <map>

#include "block8/tables.h"

namespace fastddp {
namespace {

constexpr uintptr_t kWireAlignment = 16;

bool is_aligned(const at::Tensor& wire) {
  return wire.is_contiguous() && reinterpret_cast<uintptr_t>(wire.const_data_ptr()) % kWireAlignment == 0;
}

int64_t key_of(const Rounding& rounding) {
  return rounding.has_value() ? std::bit_cast<int64_t>(rounding->key) : 0;
}

class GpuBlock8Kernels : public Block8Kernels {
 public:
  GpuBlock8Kernels(Block8 format, c10::Device device, Purpose purpose) : format_(format), launcher_(device, purpose) {}

  void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& before, const at::Tensor& error,
              const at::Tensor& wire, double scale, Rounding rounding) override {
    const auto* kernel = find("encode", gradients, wire, error, rounding.has_value());
    const bool is_done = launched({kernel}, [&] {
      const auto tables = refresh(of_call(encode_, gradients.front().first_block), gradients, *kernel);
      launcher_.run(*kernel, tables.programs, wire, before, error, tables.addresses, tables.rows, scale, key_of(rounding));
    });
    if (!is_done) otherwise_->encode(gradients, before, error, wire, scale, rounding);
  }

  void add(const std::vector<at::Tensor>& shards, const at::Tensor& target, const at::Tensor& error, Rounding rounding,
           int64_t first_element) override {
    const bool are_aligned = is_aligned(target) && std::ranges::all_of(shards, is_aligned);
    const auto* kernel = are_aligned ? launcher_.find(name_of_kernel("add", rounding.has_value())) : nullptr;
    const bool is_done = launched({kernel}, [&] {
      const auto& addresses = of_call(add_, first_element).refresh(shard_words(shards));
      const auto blocks = target.numel() / format_.group_bytes() * Block8::kBlocks;
      const auto elements = kernel->tile.at(0);
      const auto programs = (blocks * format_.block + elements - 1) / elements;
      launcher_.run(*kernel, programs, addresses, static_cast<int64_t>(shards.size()), target, error, blocks, first_element,
                    key_of(rounding));
    });
    if (!is_done) otherwise_->add(shards, target, error, rounding, first_element);
  }

  at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) override {
    const auto* kernel = find("decode", gradients, wire, {});
    at::Tensor partials;
    const bool is_done = launched({kernel}, [&] {
      const auto tables = refresh(decode_, gradients, *kernel);
      partials = launcher_.empty({tables.programs, 2}, at::kDouble);
      launcher_.run(*kernel, tables.programs, wire, tables.addresses, tables.rows, partials);
    });
    return is_done ? partials : otherwise_->decode(gradients, wire);
  }

  const Launcher* launcher() const override { return &launcher_; }

 private:
  LaunchTables::OnDevice refresh(LaunchTables& tables, const std::vector<BlockedGradient>& gradients,
                                 const LoadedKernel& kernel) const {
    const auto runs = [&] { return run_words(gradients, format_, kernel.tile.at(0)); };
    return tables.refresh(gradient_words(gradients), place_words(gradients), runs, kRunWords);
  }

  // Each call of a window has its own tables. Its first block or element in the wire identifies the call.
  template <typename Table>
  Table& of_call(std::map<int64_t, Table>& tables, int64_t first) {
    return tables.try_emplace(first, launcher_).first->second;
  }

  std::string name_of_kernel(const std::string& form, bool drawn) const {
    return "fastddp_block8_" + form + "_" + Block8::kNames[static_cast<size_t>(format_.number)] + "_" +
           std::to_string(format_.block) + (drawn ? "_drawn" : "");
  }

  // Null if torch's operators have to do it: the gradients have no kernel for their dtype, several dtypes, or a memory layout
  // that no kernel takes.
  const LoadedKernel* find(const char* form, const std::vector<BlockedGradient>& gradients, const at::Tensor& wire,
                           const at::Tensor& error, bool drawn = false) const {
    if (gradients.empty() || !is_aligned(wire) || (error.defined() && !error.is_contiguous())) return nullptr;
    const auto dtype = gradients.front().gradient.scalar_type();
    for (const auto& [gradient, first_block] : gradients) {
      if (gradient.scalar_type() != dtype || gradient.is_neg() || !gradient.is_contiguous()) return nullptr;
    }
    return launcher_.find(name_of_kernel(std::string(form) + "_" + triton_name(dtype), drawn));
  }

  const Block8 format_;
  const std::unique_ptr<Block8Kernels> otherwise_ = make_aten_block8_kernels(format_);
  Launcher launcher_;
  std::map<int64_t, LaunchTables> encode_;
  std::map<int64_t, DeviceTable> add_;
  LaunchTables decode_{launcher_};
};

}  // namespace

std::unique_ptr<Block8Kernels> make_block8_kernels(Block8 format, c10::Device device, Purpose purpose) {
  if (device.is_cpu()) return make_cpu_block8_kernels(format);
  if (CudaDriver::of(device.type()) == nullptr) return make_aten_block8_kernels(format);
  return std::make_unique<GpuBlock8Kernels>(format, device, purpose);
}

}  // namespace fastddp
