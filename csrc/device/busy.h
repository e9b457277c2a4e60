// Useless work for a device, so that the host gets ahead of it.
#pragma once

#include <c10/core/Device.h>

namespace fastddp {

// Note [What a device takes]
// In training the host is ahead: it starts new work before the device is done with earlier work. A measurement that begins on an
// idle device shows how fast the host starts work, not how long the device takes. So the current stream gets something to do
// first, for about as long as the host needs to start everything that is measured.
//
// The work is a sum along a table of two columns, by one thread a column. It takes long, and leaves memory and multiprocessors to
// what follows. The table has integers, since torch refuses such a sum of floats where users ask for deterministic algorithms.
// Where the host computes there is nothing to do.
void keep_busy(c10::Device device, double seconds);

// No measurement is worth a longer head start. Where the host itself waits for collectives, none is ever enough.
constexpr double kLongestHeadStart = 0.02;

}  // namespace fastddp
