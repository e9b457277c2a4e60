// Work for a device that nobody needs, so that the host gets ahead of it.
#pragma once

#include <c10/core/Device.h>

namespace fastddp {

// Note [What a device takes]
// In training the host is ahead: it has started what comes next before the device is done with what was before. A measurement
// that begins on an idle device shows how fast the host starts things, and not what the device takes. So the current stream gets
// something to do first, for about as long as the host needs to start all that is measured.
//
// The work is a sum along a table of two columns, by one thread a column: it takes long, and leaves memory and multiprocessors to
// what follows. Integers, since torch refuses the sum of floats where users ask for deterministic algorithms. Where computing is
// the host's there is nothing to do.
void keep_busy(c10::Device device, double seconds);

// More than that no measurement is worth; where the host waits for collectives itself, nothing would ever be enough.
constexpr double kLongestHeadStart = 0.02;

}  // namespace fastddp
