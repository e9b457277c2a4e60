// A fake libcuda: the functions of the driver that it takes to load and launch compiled kernels, exported under
// their own names. This header is for the bindings; callers of the driver look its functions up.
#pragma once

namespace fake_cuda {

// Compute capability of all devices, without the dot.
void set_capability(int capability);

}  // namespace fake_cuda
