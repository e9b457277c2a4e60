// Why a step stands still: a function from what the ranks say of themselves.
#pragma once

#include <vector>

#include "watch/record.h"
#include "watch/report.h"

namespace fastddp {

// `records`: at most one a rank; of those that are not there nothing is known.
Report diagnose(const std::vector<Record>& records, int ranks);

}  // namespace fastddp
