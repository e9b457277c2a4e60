// Why a step stands still, as a function of what the ranks say about themselves.
#pragma once

#include <vector>

#include "watch/record.h"
#include "watch/report.h"

namespace fastddp {

// `records`: at most one a rank; of a rank without one, nothing is known.
Report diagnose(const std::vector<Record>& records, int ranks);

}  // namespace fastddp
