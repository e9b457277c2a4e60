// A fake libcuda: the functions of the driver that it takes to load and launch compiled kernels, exported under
// their own names. This header is for the bindings; callers of the driver look its functions up.
#pragma once

#include <string>

#include "twin.h"

namespace fake_cuda {

// Kernels with this in their names have this fault from now on, and no others.
void break_kernels(const std::string& part_of_name, Fault fault);

// Compute capability of all devices, without the dot.
void set_capability(int capability);

}  // namespace fake_cuda
