#include "device/busy.h"

#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "device/streams.h"

namespace fastddp {
namespace {

constexpr int64_t kBusyRows = 4096;

class BusyWork {
 public:
  explicit BusyWork(c10::Device device)
      : table_(at::zeros({kBusyRows, 2}, at::TensorOptions().dtype(at::kLong).device(device))),
        sums_(at::empty_like(table_)) {}

  void put(int64_t passes) {
    for (int64_t pass = 0; pass < passes; ++pass) at::cumsum_out(sums_, table_, 0);
  }

 private:
  at::Tensor table_, sums_;
};

// Seconds of one pass. The host waits.
double measured_pass(BusyWork& work, c10::Device device) {
  constexpr int64_t passes = 4;
  constexpr double shortest = 2e-5;  // no device adds up so many numbers in less
  auto seconds = std::numeric_limits<double>::infinity();
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto begin = Moment::now(device);
    work.put(passes);
    seconds = std::min(seconds, Moment::now(device).seconds_since(begin) / passes);
  }
  return std::max(seconds, shortest);
}

double seconds_of_a_pass(BusyWork& work, c10::Device device) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<c10::Device, double>();  // Note [Never destroyed]
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, measured_pass(work, device)).first->second;
}

}  // namespace

void keep_busy(c10::Device device, double seconds) {
  if (!has_streams(device)) return;
  BusyWork work(device);
  const auto passes = std::min(seconds, kLongestHeadStart) / seconds_of_a_pass(work, device);
  work.put(static_cast<int64_t>(std::ceil(passes)));
}

}  // namespace fastddp
