#include "cubin.h"

#include <elf.h>

#include <cstring>
#include <stdexcept>

namespace fake_cuda {
namespace {

// Attributes of a section .nv.info.<kernel>: a byte of form, one of kind, then 16 bits that are the value or, in the form
// with a payload, its size in bytes.
constexpr uint8_t kWithPayload = 0x04;
constexpr uint8_t kRequiredBlock = 0x10;
constexpr uint8_t kParameter = 0x17;
constexpr unsigned kSizeShift = 18;  // of a parameter's size in the last word of its attribute

const std::string kInfo = ".nv.info.";

template <typename T>
T read(const char* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

void read_attributes(Kernel& kernel, const char* begin, size_t bytes) {
  struct ParameterInfo {
    uint32_t index;
    uint16_t ordinal;
    uint16_t offset;
    uint32_t flags;
  };
  for (const char* at = begin; at < begin + bytes;) {
    const auto form = read<uint8_t>(at), kind = read<uint8_t>(at + 1);
    const auto size = form == kWithPayload ? read<uint16_t>(at + 2) : 0;
    const char* payload = at + 4;
    if (kind == kParameter) {
      const auto info = read<ParameterInfo>(payload);
      if (kernel.parameters.size() <= info.ordinal) kernel.parameters.resize(info.ordinal + 1);
      kernel.parameters[info.ordinal] = {info.offset, info.flags >> kSizeShift};
    } else if (kind == kRequiredBlock) {
      kernel.required_block = read<std::array<unsigned, 3>>(payload);
    }
    at = payload + size;
  }
}

// The architecture is in the lowest byte of the flags, or, since version 8 of the ABI, in the one above.
int capability_of(const Elf64_Ehdr& header) {
  constexpr unsigned char moved = 8;
  return static_cast<int>(header.e_ident[EI_ABIVERSION] >= moved ? header.e_flags >> 8 & 0xFF : header.e_flags & 0xFF);
}

}  // namespace

Cubin read_cubin(const void* image) {
  const auto* bytes = static_cast<const char*>(image);
  const auto header = read<Elf64_Ehdr>(bytes);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != EM_CUDA) {
    throw std::runtime_error("not a cubin");
  }
  const auto section = [&](size_t i) { return read<Elf64_Shdr>(bytes + header.e_shoff + i * header.e_shentsize); };
  const char* names = bytes + section(header.e_shstrndx).sh_offset;
  Cubin cubin{capability_of(header), {}};
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const auto info = section(i);
    const std::string name = names + info.sh_name;
    if (!name.starts_with(kInfo)) continue;
    Kernel kernel{name.substr(kInfo.size()), {}, {}};
    read_attributes(kernel, bytes + info.sh_offset, info.sh_size);
    cubin.kernels.emplace(kernel.name, kernel);
  }
  return cubin;
}

}  // namespace fake_cuda
