// Pack and unpack on a GPU: one launch of a Triton kernel a bucket. What the kernels do not take goes to torch's
// operators.
#include "kernels_gpu.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <tuple>

#include "address_table.h"
#include "cuda_driver.h"
#include "kernels.h"
#include "streams.h"

namespace fastddp {
namespace {

// wire, table of addresses, chunks, scale; Triton appends its scratch pointers.
constexpr size_t kParameters = 4;
constexpr size_t kMostScratch = 2;
constexpr unsigned kWarp = 32;

using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, Form, c10::ScalarType, c10::ScalarType>;

struct Loaded {
  LoadedKernel kernel;
  size_t scratch_parameters;
};

std::mutex loaded_mutex;

std::map<Key, Loaded>& loaded() {
  static std::map<Key, Loaded> all;
  return all;
}

void need_index(c10::Device device) {
  TORCH_CHECK_VALUE(device.has_index(), "fastddp: device '", device, "' has no index; name one, as in '", device,
                    ":0'");
}

Key key(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire) {
  need_index(device);
  return {device.type(), device.index(), form, gradient, wire};
}

// Null if it has not been loaded. What has been stays loaded, where it is, until the process ends.
const Loaded* find(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire) {
  const std::lock_guard lock(loaded_mutex);
  const auto found = loaded().find(key(device, form, gradient, wire));
  return found == loaded().end() ? nullptr : &found->second;
}

class GpuKernels : public Kernels {
 public:
  GpuKernels(c10::Device device, const CudaDriver& driver)
      : device_(device), driver_(driver), pack_table_(device, driver), unpack_table_(device, driver) {}

  void pack(const std::vector<Slot>& slots, double scale) override {
    const auto rest = launch(Form::pack, slots, scale, pack_table_);
    pack_with_operators(rest, scale);
  }

  at::Tensor unpack(const std::vector<Slot>& slots, bool) override {
    const auto rest = launch(Form::unpack, slots, 1.0, unpack_table_);
    unpack_with_operators(rest);
    return {};
  }

  size_t launches() const override {
    return launches_;
  }

  size_t uploads() const override {
    return pack_table_.uploads() + unpack_table_.uploads();
  }

 private:
  // Returns the slots that no kernel takes.
  std::vector<Slot> launch(Form form, const std::vector<Slot>& slots, double scale, AddressTable& table) {
    TableWords words;
    std::vector<Slot> rest;
    for (const auto& slot : slots) {
      if (!words.add(slot, form == Form::unpack)) rest.push_back(slot);
    }
    if (words.empty()) return rest;
    const auto* found = find(device_, form, words.gradient_dtype(), words.wire_dtype());
    if (found == nullptr) return slots;
    const auto tables = table.refresh(words, found->kernel.chunk_elements);
    const void* wire = words.wire();
    const void* addresses = tables.addresses.const_data_ptr();
    const void* chunks = tables.chunks.const_data_ptr();
    const void* scratch = nullptr;
    void* parameters[kParameters + kMostScratch] = {&wire, &addresses, &chunks, &scale, &scratch, &scratch};
    const auto stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    driver_.launch(found->kernel, tables.programs, stream, parameters);
    ++launches_;
    return rest;
  }

  const c10::Device device_;
  const CudaDriver& driver_;
  // One a direction, since pack and unpack run on different streams.
  AddressTable pack_table_;
  AddressTable unpack_table_;
  size_t launches_ = 0;
};

}  // namespace

void load_kernel(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire,
                 const CompiledKernel& kernel) {
  const auto* driver = CudaDriver::of(device.type());
  TORCH_CHECK(driver != nullptr, "fastddp: no CUDA driver (libcuda.so.1) was found for ", device);
  TORCH_CHECK_VALUE(kernel.scratch_parameters <= kMostScratch, "fastddp: kernel ", kernel.name, " takes ",
                    kernel.scratch_parameters, " scratch pointers; the launcher passes at most ", kMostScratch);
  auto* function =
      driver->load(device, kernel.cubin, kernel.name, kernel.shared_bytes, kParameters + kernel.scratch_parameters);
  const LoadedKernel loaded_kernel{function, kWarp * kernel.warps, kernel.shared_bytes, kernel.chunk_elements};
  const std::lock_guard lock(loaded_mutex);
  loaded().try_emplace(key(device, form, gradient, wire), Loaded{loaded_kernel, kernel.scratch_parameters});
}

bool has_kernel(c10::Device device, Form form, c10::ScalarType gradient, c10::ScalarType wire) {
  return find(device, form, gradient, wire) != nullptr;
}

std::unique_ptr<Kernels> make_gpu_kernels(c10::Device device) {
  need_index(device);
  return std::make_unique<GpuKernels>(device, *CudaDriver::of(device.type()));
}

}  // namespace fastddp
