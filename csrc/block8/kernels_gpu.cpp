// Block8 on a GPU: launches the Triton kernels of kernels/block8_kernels.py, once for all gradients of a call. torch's
// operators do what these kernels cannot.
#include <algorithm>
#include <bit>
#include <map>

#include "block8/tables.h"
#include "device/scratch.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

constexpr uintptr_t kWireAlignment = 16;

bool is_aligned(const at::Tensor& wire) {
  return wire.is_contiguous() && reinterpret_cast<uintptr_t>(wire.const_data_ptr()) % kWireAlignment == 0;
}

const void* pointer_or_null(const at::Tensor& error) {
  return error.defined() ? error.const_data_ptr() : nullptr;
}

int64_t key_of(const Rounding& rounding) {
  return rounding.has_value() ? std::bit_cast<int64_t>(rounding->key) : 0;
}

// The tables of one kind of call: where its gradients are, and which part each program works on.
class GradientTables {
 public:
  GradientTables(c10::Device device, const CudaDriver& driver) : gradients_(device, driver), runs_(device, driver) {}

  struct OnDevice {
    const void* gradients;
    const void* runs;
    unsigned programs;
  };
  OnDevice refresh(const std::vector<BlockedGradient>& gradients, Block8 format, int64_t elements) {
    const auto& addresses = gradients_.refresh(gradient_words(gradients));
    const auto& runs = runs_.refresh(place_words(gradients), [&] { return run_words(gradients, format, elements); });
    return {addresses.const_data_ptr(), runs.const_data_ptr(), static_cast<unsigned>(runs.numel() / kRunWords)};
  }

  size_t uploads() const { return gradients_.uploads() + runs_.uploads(); }

 private:
  DeviceTable gradients_;
  DeviceTable runs_;
};

class GpuBlock8Kernels : public Block8Kernels {
 public:
  GpuBlock8Kernels(Block8 format, c10::Device device, const CudaDriver& driver, Purpose purpose)
      : format_(format),
        device_(device),
        driver_(driver),
        purpose_(purpose),
        decode_(device, driver),
        launcher_(device, driver),
        scratch_(device, purpose) {}

  void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& before, const at::Tensor& error,
              const at::Tensor& wire, double scale, Rounding rounding) override {
    const auto* kernel = find("encode", gradients, wire, error, rounding.has_value());
    if (kernel == nullptr) return otherwise_->encode(gradients, before, error, wire, scale, rounding);
    const auto tables = of_call(encode_, gradients.front().first_block).refresh(gradients, format_, kernel->tile.at(0));
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, tables.programs, wire.const_data_ptr(), pointer_or_null(before), pointer_or_null(error),
                        tables.gradients, tables.runs, scale, key_of(rounding));
        },
        [&] { otherwise_->encode(gradients, before, error, wire, scale, rounding); });
  }

  void add(const std::vector<at::Tensor>& shards, const at::Tensor& target, const at::Tensor& error, Rounding rounding,
           int64_t first_element) override {
    const auto* kernel = find_kernel(device_, name_of_kernel("add", rounding.has_value()), purpose_);
    if (kernel == nullptr || !is_aligned(target) || !std::ranges::all_of(shards, is_aligned)) {
      return otherwise_->add(shards, target, error, rounding, first_element);
    }
    const auto& addresses = of_call(add_, first_element).refresh(shard_words(shards));
    const auto blocks = target.numel() / format_.group_bytes() * Block8::kBlocks;
    const auto elements = kernel->tile.at(0);
    const auto programs = static_cast<unsigned>((blocks * format_.block + elements - 1) / elements);
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, programs, addresses.const_data_ptr(), static_cast<int64_t>(shards.size()),
                        target.const_data_ptr(), pointer_or_null(error), blocks, first_element, key_of(rounding));
        },
        [&] { otherwise_->add(shards, target, error, rounding, first_element); });
  }

  at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) override {
    const auto* kernel = find("decode", gradients, wire, {});
    if (kernel == nullptr) return otherwise_->decode(gradients, wire);
    const auto tables = decode_.refresh(gradients, format_, kernel->tile.at(0));
    auto partials = scratch_.empty({tables.programs, 2}, at::kDouble);
    launch_or_else(
        {kernel},
        [&] {
          launcher_.run(*kernel, tables.programs, wire.const_data_ptr(), tables.gradients, tables.runs,
                        partials.const_data_ptr());
        },
        [&] { write_sums(otherwise_->decode(gradients, wire), partials); });
    return partials;
  }

  size_t launches() const override { return launcher_.launches(); }

  size_t uploads() const override {
    auto uploads = decode_.uploads();
    for (const auto& [first, tables] : encode_) uploads += tables.uploads();
    for (const auto& [first, table] : add_) uploads += table.uploads();
    return uploads;
  }

  bool wrote_around() const override { return scratch_.wrote_around(); }

 private:
  // Each call of a window has its own tables. Its first block or element in the wire identifies the call.
  template <typename Table>
  Table& of_call(std::map<int64_t, Table>& tables, int64_t first) {
    return tables.try_emplace(first, device_, driver_).first->second;
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
    return find_kernel(device_, name_of_kernel(std::string(form) + "_" + triton_name(dtype), drawn), purpose_);
  }

  const Block8 format_;
  const c10::Device device_;
  const CudaDriver& driver_;
  const Purpose purpose_;
  const std::unique_ptr<Block8Kernels> otherwise_ = make_aten_block8_kernels(format_);
  // Each kind of call has its own tables, since they run on different streams.
  std::map<int64_t, GradientTables> encode_;
  std::map<int64_t, DeviceTable> add_;
  GradientTables decode_;
  Launcher launcher_;
  Scratch scratch_;
};

}  // namespace

std::unique_ptr<Block8Kernels> make_gpu_block8_kernels(Block8 format, c10::Device device, Purpose purpose) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device, ":0'");
  return std::make_unique<GpuBlock8Kernels>(format, device, *CudaDriver::of(device.type()), purpose);
}

}  // namespace fastddp
