#include "window_status.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>

#include "cuda_driver.h"
#include "ranges.h"

namespace fastddp {
namespace {

constexpr size_t kDigits = 2;
constexpr int kBase = 256;
using Header = std::array<uint8_t, 2 * kDigits>;

Header header_of(int failed_rank) {
  Header header{};
  for (size_t i = 0; i < kDigits; ++i, failed_rank /= kBase) {
    header[i] = failed_rank % kBase;
    header[kDigits + i] = kBase - 1 - header[i];
  }
  return header;
}

// What the greatest of all ranks' headers says.
std::optional<std::string> failed_rank(const uint8_t* header) {
  if (std::all_of(header, header + 2 * kDigits, [](uint8_t byte) { return byte == 0; })) return std::nullopt;
  int rank = 0;
  for (size_t i = kDigits; i-- > 0;) {
    if (header[i] + header[kDigits + i] != kBase - 1) return "several ranks";
    rank = rank * kBase + header[i];
  }
  return "rank " + std::to_string(rank);
}

bool is_captured(c10::Device device) {
  const auto* const driver = CudaDriver::of(device.type());
  return driver != nullptr && driver->is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace

void WindowStatus::send(c10d::ProcessGroup& group, c10::Device device, bool failed, const std::vector<Used>& used) {
  const auto count = static_cast<int64_t>(sizeof(Header) + used.size());
  const bool all_are_zero = !failed && used.empty();
  if (all_are_zero) {
    wire_ = at::zeros({count}, at::TensorOptions().dtype(at::kByte).device(device));  // no copy from the host
  } else {
    const auto mine = at::zeros({count}, at::kByte);
    auto* bytes = mine.mutable_data_ptr<uint8_t>();
    if (failed) bytes = std::ranges::copy(header_of(group.getRank()), bytes).out;
    std::ranges::transform(used, mine.mutable_data_ptr<uint8_t>() + sizeof(Header),
                           [](Used of) { return static_cast<uint8_t>(of); });
    wire_ = mine.to(device);
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{wire_};
  const Range range("fastddp.status");
  work_ = group.allreduce(tensors, options);
}

void WindowStatus::wait() {
  work_->wait();
  const auto everywhere = wire_.cpu();
  const auto* const bytes = everywhere.const_data_ptr<uint8_t>();
  failed_ = failed_rank(bytes);
  used_.clear();
  std::transform(bytes + sizeof(Header), bytes + everywhere.numel(), std::back_inserter(used_),
                 [](uint8_t byte) { return Used(byte); });
}

// In a captured step nobody can be told: its graph is replayed without the host.
void WindowStatus::arrive_later(size_t window) {
  work_->wait();
  if (is_captured(wire_.device())) return;
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  Arriving arriving{window, at::empty({sizeof(Header)}, options), c10::Event(wire_.device().type())};
  keep_for_current_stream(wire_);
  arriving.on_host.copy_(wire_.narrow(0, 0, sizeof(Header)), /*non_blocking=*/true);
  arriving.event.record(c10::impl::VirtualGuardImpl(wire_.device().type()).getStream(wire_.device()));
  arriving_.push_back(std::move(arriving));
}

std::optional<WindowStatus::Failure> WindowStatus::take_late_failure() {
  while (!arriving_.empty() && arriving_.front().event.query()) {
    const auto arrived = std::move(arriving_.front());
    arriving_.pop_front();
    if (const auto rank = failed_rank(arrived.on_host.const_data_ptr<uint8_t>())) return Failure{arrived.window, *rank};
  }
  return std::nullopt;
}

void WindowStatus::reset() {
  work_.reset();
  wire_.reset();
  failed_.reset();
  used_.clear();
}

}  // namespace fastddp
