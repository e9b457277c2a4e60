// What a cubin says of its kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake_cuda {

struct Parameter {
  size_t offset;
  size_t size;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::array<unsigned, 3> required_block{};  // zeros: any
};

struct Cubin {
  int capability;
  std::map<std::string, Kernel> kernels;
};

// Raises std::runtime_error if the image is no cubin.
Cubin read_cubin(const void* image);

}  // namespace fake_cuda
