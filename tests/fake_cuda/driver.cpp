// A fake libcuda: the functions of the driver that fastddp looks up, with the signatures of cuda.h. Modules are real cubins;
// kernels run as their twins, in the simulated streams.
#include "module.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "device.h"
#include "twin.h"

namespace fake_cuda {
namespace {

// --------------------------------------------------------------------------------------------------------------- cubins

struct Parameter {
  size_t offset;
  size_t size;
};

struct Kernel {
  std::vector<Parameter> parameters;
  std::array<unsigned, 3> required_block{};  // zeros: any
};

struct Cubin {
  int capability;
  std::map<std::string, Kernel> kernels;
};

template <typename T>
T read(const char* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

// Attributes of a section .nv.info.<kernel>: a byte of form, one of kind, then 16 bits that are the value or, in the form
// with a payload, its size in bytes.
Kernel read_attributes(const char* at, const char* end) {
  constexpr uint8_t with_payload = 0x04, required_block = 0x10, parameter = 0x17;
  constexpr unsigned size_shift = 18;  // of a parameter's size in the last word of its attribute
  struct ParameterInfo {
    uint32_t index;
    uint16_t ordinal;
    uint16_t offset;
    uint32_t flags;
  };
  Kernel kernel;
  while (at < end) {
    const auto form = read<uint8_t>(at), kind = read<uint8_t>(at + 1);
    const char* payload = at + 4;
    if (kind == parameter) {
      const auto info = read<ParameterInfo>(payload);
      if (kernel.parameters.size() <= info.ordinal) kernel.parameters.resize(info.ordinal + 1);
      kernel.parameters[info.ordinal] = {info.offset, info.flags >> size_shift};
    } else if (kind == required_block) {
      kernel.required_block = read<std::array<unsigned, 3>>(payload);
    }
    at = payload + (form == with_payload ? read<uint16_t>(at + 2) : 0);
  }
  return kernel;
}

Cubin read_cubin(const void* image) {
  const auto* bytes = static_cast<const char*>(image);
  const auto header = read<Elf64_Ehdr>(bytes);
  const auto section = [&](size_t i) { return read<Elf64_Shdr>(bytes + header.e_shoff + i * header.e_shentsize); };
  const char* names = bytes + section(header.e_shstrndx).sh_offset;
  // The architecture is in the lowest byte of the flags, or, since version 8 of the ABI, in the one above.
  Cubin cubin{static_cast<int>(header.e_flags >> (header.e_ident[EI_ABIVERSION] >= 8 ? 8 : 0) & 0xFF), {}};
  for (size_t i = 0; i < header.e_shnum; ++i) {
    static const std::string prefix = ".nv.info.";
    const auto info = section(i);
    const std::string name = names + info.sh_name;
    if (!name.starts_with(prefix)) continue;
    const auto* begin = bytes + info.sh_offset;
    cubin.kernels.emplace(name.substr(prefix.size()), read_attributes(begin, begin + info.sh_size));
  }
  return cubin;
}

// --------------------------------------------------------------------------------------------------------------- kernels

int capability_of_devices = 90;
std::string broken, fault_of_broken = "none";

std::string fault_of(const std::string& kernel) {
  return kernel.find(broken) == std::string::npos ? "none" : fault_of_broken;
}

std::optional<Twin> twin_of(const std::string& kernel) {
  for (const auto& find : {pack_twin, low_rank_twin, basis_twin, block8_twin}) {
    if (auto twin = find(kernel)) return twin;
  }
  return std::nullopt;
}

void run(const Launch& launch, const Twin& twin, const std::string& fault) {
  std::vector<int64_t> programs(launch.programs);
  std::iota(programs.begin(), programs.end(), 0);
  static std::mt19937 random;
  std::ranges::shuffle(programs, random);
  if (fault == "program") programs.pop_back();
  for (const auto program : programs) twin.run(launch, program);
  if (fault == "bit") *launch.pointer<char>(0) ^= 1;
  if (fault == "after sums") launch.pointer<char>(2)[launch.programs * 2 * sizeof(double)] ^= 1;
}

// --------------------------------------------------------------------------------------------------------------- handles

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kOutOfResources = 701,
};

// Names as cuda.h has them, and texts.
const std::map<int, std::pair<const char*, const char*>> kResults{
    {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {214, {"CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"}},
    {218, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
    {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
    {702, {"CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"}},
    {710, {"CUDA_ERROR_ASSERT", "device-side assert triggered"}},
    {714, {"CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"}},
    {715, {"CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"}},
    {716, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
    {717, {"CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"}},
    {718, {"CUDA_ERROR_INVALID_PC", "invalid program counter"}},
    {719, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {901, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
    {999, {"CUDA_ERROR_UNKNOWN", "unknown error"}},
};

constexpr unsigned kSharedLimit = 48 << 10;        // of a block, unless a function asked for more
constexpr unsigned kOptInSharedLimit = 227 << 10;  // that it can ask for

// A primary context is known by its address: that of its device's default stream.
struct Module {
  Cubin cubin;
  Queue* context;
};

struct Function {
  std::string name;
  Kernel kernel;
  Twin twin;
  Queue* context;
  unsigned shared_limit = kSharedLimit;
};

Queue* context_of(int device) {
  return &Simulator::get().queue(static_cast<c10::DeviceIndex>(device), 0);
}

Queue* current_context() {
  return has_context ? context_of(current_device().index()) : nullptr;
}

// What the driver answers in any case: that the thread has no context, or with the error of what ran before.
int answer_to_all() {
  return current_context() == nullptr ? kInvalidContext : Simulator::get().failed_with.load();
}

// An error of what ran before, which stays.
bool stays(int result) {
  return result == 214 || result == kIllegalAddress || (result > kOutOfResources && result < 800) || result == 999;
}

int answer_by_fault(const std::string& fault) {
  if (fault == "launch") return kOutOfResources;
  const bool is_number = !fault.empty() && std::ranges::all_of(fault, [](unsigned char c) { return std::isdigit(c); });
  if (!is_number) return kSuccess;
  const auto result = std::stoi(fault);
  if (stays(result)) Simulator::get().failed_with = result;
  return result;
}

}  // namespace

void break_kernels(const std::string& part_of_name, const std::string& fault) {
  broken = part_of_name;
  fault_of_broken = fault;
}

void set_capability(int capability) {
  capability_of_devices = capability;
}

}  // namespace fake_cuda

using namespace fake_cuda;

#define DRIVER_API extern "C" __attribute__((visibility("default"))) int

DRIVER_API cuInit(unsigned) {
  return kSuccess;
}

DRIVER_API cuGetErrorName(int result, const char** name) {
  const auto known = kResults.find(result);
  *name = known == kResults.end() ? nullptr : known->second.first;
  return *name == nullptr ? kInvalidValue : kSuccess;
}

DRIVER_API cuGetErrorString(int result, const char** text) {
  const auto known = kResults.find(result);
  *text = known == kResults.end() ? nullptr : known->second.second;
  return *text == nullptr ? kInvalidValue : kSuccess;
}

DRIVER_API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

DRIVER_API cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int major = 75;  // and 76 the minor number
  *value = attribute == major ? capability_of_devices / 10 : capability_of_devices % 10;
  return kSuccess;
}

DRIVER_API cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return kSuccess;
}

DRIVER_API cuCtxGetCurrent(void** context) {
  *context = current_context();
  return kSuccess;
}

DRIVER_API cuCtxSetCurrent(void* context) {
  set_context(static_cast<Queue*>(context)->device);
  return kSuccess;
}

DRIVER_API cuModuleLoadData(void** module, const void* image) {
  if (const auto answer = answer_to_all()) return answer;
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return kInvalidImage;
  auto cubin = read_cubin(image);
  // A binary for 9.0 runs on 9.x from there on.
  if (cubin.capability / 10 != capability_of_devices / 10 || cubin.capability > capability_of_devices) return kNoBinary;
  for (const auto& [name, kernel] : cubin.kernels) {
    if (fault_of(name) == "load") return kInvalidImage;
  }
  *module = new Module{std::move(cubin), current_context()};
  return kSuccess;
}

DRIVER_API cuModuleGetFunction(void** function, void* module, const char* name) {
  if (const auto answer = answer_to_all()) return answer;
  const auto& [cubin, context] = *static_cast<Module*>(module);
  const auto found = cubin.kernels.find(name);
  const auto twin = twin_of(name);
  if (found == cubin.kernels.end() || !twin.has_value()) return kNotFound;
  *function = new Function{name, found->second, *twin, context};
  return kSuccess;
}

DRIVER_API cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  if (const auto answer = answer_to_all()) return answer;
  const auto& parameters = static_cast<Function*>(function)->kernel.parameters;
  if (index >= parameters.size()) return kInvalidValue;
  *offset = parameters[index].offset;
  *size = parameters[index].size;
  return kSuccess;
}

DRIVER_API cuFuncSetAttribute(void* function, int attribute, int value) {
  if (const auto answer = answer_to_all()) return answer;
  constexpr int max_dynamic_shared = 8;
  if (attribute != max_dynamic_shared || value < 0 || value > static_cast<int>(kOptInSharedLimit)) return kInvalidValue;
  static_cast<Function*>(function)->shared_limit = static_cast<unsigned>(value);
  return kSuccess;
}

DRIVER_API cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
  const auto& [name, kernel, twin, context, shared_limit] = *static_cast<Function*>(handle);
  auto& queue = queue_of_handle(stream);
  if (const auto answer = answer_to_all()) return answer;
  if (current_context() != context || queue.device != context->device) return kInvalidHandle;
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || shared > shared_limit || extra != nullptr) return kInvalidValue;
  const std::array<unsigned, 3> block = {block_x, block_y, block_z};
  if (kernel.required_block != std::array<unsigned, 3>{} && block != kernel.required_block) return kInvalidValue;
  // The driver copies the values at the launch, as many as the binary says. The last ones are of scratch memory: null.
  constexpr size_t scratch = 2;
  Launch launch{name, {}, grid_x * grid_y * grid_z, queue.device};
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    launch.values.push_back(*static_cast<const uint64_t*>(parameters[i]));
  }
  if (launch.values.size() != twin.parameters + scratch) return kInvalidValue;
  for (size_t i = 0; i < scratch; ++i, launch.values.pop_back()) {
    if (launch.values.back() != 0) return kInvalidValue;
  }
  const auto fault = fault_of(name);
  if (const auto answer = answer_by_fault(fault)) return answer;
  Simulator::get().with_records([&](Records& records) {
    if (name == "fastddp_write_words") {
      ++records.uploads;
    } else {
      records.launches.push_back(name);
    }
  });
  Simulator::get().enqueue(queue, {name, [launch, twin = twin, fault] { run(launch, twin, fault); }});
  return kSuccess;
}

DRIVER_API cuStreamQuery(void* stream) {
  if (const auto answer = answer_to_all()) return answer;
  auto& simulator = Simulator::get();
  return simulator.query(simulator.last(queue_of_handle(stream))) ? kSuccess : kNotReady;
}

DRIVER_API cuStreamIsCapturing(void* stream, int* status) {
  if (const auto answer = answer_to_all()) return answer;
  *status = queue_of_handle(stream).capture != nullptr ? 1 : 0;
  return kSuccess;
}

DRIVER_API cuThreadExchangeStreamCaptureMode(int* mode) {
  if (const auto answer = answer_to_all()) return answer;
  std::swap(*mode, capture_mode);
  return kSuccess;
}
