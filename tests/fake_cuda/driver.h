#pragma once

#include <string>

namespace fake_cuda {

// What a kernel gets wrong, on purpose.
enum class Fault {
  none,
  bit,      // one is flipped in the first byte of the output, after it has run (pack and block8's encode)
  program,  // one of its programs does not run
  launch,   // is refused
  load,     // is refused
};

// Kernels with this in their names have this fault from now on, and no others.
void break_kernels(const std::string& part_of_name, Fault fault);

// Compute capability of all devices, without the dot. Modules for another one do not load.
void set_capability(int capability);

}  // namespace fake_cuda
