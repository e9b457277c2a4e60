#include "window/status.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>

#include "device/cuda_driver.h"
#include "observe/ranges.h"
#include "transport/works.h"

namespace fastddp {
namespace {

constexpr int kBase = 256;
constexpr size_t kMost = 65535;  // the greatest Number

constexpr auto kMixed =
    "met that of another model: the backwards of models have to come in the same order on all ranks";
constexpr auto kNumbered = "models are numbered in the order of their wrappers";

// A number from 0 to 65,535 as it travels.
struct Number {
  std::array<uint8_t, 4> bytes{};

  void set(int number) {
    for (size_t i = 0; i < 2; ++i, number /= kBase) {
      bytes[i] = number % kBase;
      bytes[2 + i] = kBase - 1 - bytes[i];
    }
  }
  bool is_set() const {
    return std::ranges::any_of(bytes, [](uint8_t byte) { return byte != 0; });
  }
  // None: ranks sent different ones.
  std::optional<int> get() const {
    const auto fits = [&](size_t i) { return bytes[i] + bytes[2 + i] == kBase - 1; };
    return fits(0) && fits(1) ? std::optional(bytes[0] + kBase * bytes[1]) : std::nullopt;
  }
};

struct Header {
  Number failed;      // the rank whose window failed
  Number lost;        // the rank that may have lost a backward
  Number forwards;    // of the window
  Number not_finite;  // the rank whose gradients are not finite
  Number model;

  bool is_mixed() const { return model.is_set() && !model.get(); }
};
static_assert(sizeof(Header) == 20);

Header header_in(const void* bytes) {
  Header header;
  std::memcpy(&header, bytes, sizeof(Header));
  return header;
}

std::string on_rank(const Number& number) {
  const auto rank = number.get();
  return rank ? "rank " + std::to_string(*rank) : "several ranks";
}

// `header`: by byte the greatest over ranks.
std::optional<std::string> trouble(const void* header) {
  const auto found = header_in(header);
  if (found.is_mixed()) return kMixed;
  if (found.failed.is_set()) return "failed on " + on_rank(found.failed);
  if (found.lost.is_set() && found.forwards.is_set() && !found.forwards.get()) {
    return "had not the same number of forwards on all ranks: an earlier backward has raised on " +
           on_rank(found.lost) +
           " before it reached the model, and that is now a step behind the others; it failed there";
  }
  return std::nullopt;
}

// Pinned for a device with streams: copies to or from pinned memory need no wait of the host.
at::TensorOptions on_host(c10::Device for_device) {
  return at::TensorOptions().dtype(at::kByte).pinned_memory(has_streams(for_device));
}

}  // namespace

// Called only if the bytes have changed: a rank mostly says the same in every window, and the device has them already.
void WindowStatus::upload(Bytes bytes, c10::Device device) {
  const auto count = static_cast<int64_t>(bytes.size());
  const auto mine = at::empty({count}, on_host(device));
  std::ranges::copy(bytes, mine.mutable_data_ptr<uint8_t>());
  said_on_device_ = at::empty({count}, at::TensorOptions().dtype(at::kByte).device(device));
  said_on_device_.copy_(mine, /*non_blocking=*/true);
  said_ = std::move(bytes);
}

void WindowStatus::send(c10d::ProcessGroup& group, c10::Device device, const Said& said) {
  Header header;
  if (said.failed) header.failed.set(said.rank);
  if (said.lost_a_backward) header.lost.set(said.rank);
  if (said.forwards > 0) header.forwards.set(static_cast<int>(std::min<size_t>(said.forwards, kBase - 1)));
  if (said.not_finite || said.not_finite_count.defined()) header.not_finite.set(said.rank);
  if (said.model > 0) header.model.set(static_cast<int>(std::min(said.model, kMost)));
  group_ = &group;
  place_ = {static_cast<int64_t>(said.model), static_cast<int64_t>(said.window)};
  Bytes bytes(sizeof(Header) + said.used.size());
  std::memcpy(bytes.data(), &header, sizeof(Header));
  std::ranges::transform(said.used, bytes.begin() + sizeof(Header), [](Used of) { return static_cast<uint8_t>(of); });
  if (bytes != said_ || !said_on_device_.defined()) upload(std::move(bytes), device);
  wire_ = at::empty_like(said_on_device_).copy_(said_on_device_);  // not clone(): tests of torch's expect no clones
  if (said.not_finite_count.defined()) {
    wire_.narrow(0, offsetof(Header, not_finite), sizeof(Number)).mul_(said.not_finite_count.gt(0));
  }
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  std::vector<at::Tensor> tensors{wire_};
  const Range range("fastddp.status");
  const WithoutPythonObjects without;
  work_ = group.allreduce(tensors, options);
}

void WindowStatus::wait() {
  Interruption::wait(*work_);
  const auto everywhere = wire_.cpu();
  const auto* const bytes = everywhere.const_data_ptr<uint8_t>();
  failed_ = trouble(bytes);
  if (header_in(bytes).is_mixed() && !has_streams(wire_.device())) *failed_ += who_is_where();
  not_finite_ = header_in(bytes).not_finite.is_set();
  used_.clear();
  std::transform(bytes + sizeof(Header), bytes + everywhere.numel(), std::back_inserter(used_),
                 [](uint8_t byte) { return Used(byte); });
}

// A collective: all ranks have seen that they are not in the same place.
std::string WindowStatus::who_is_where() const {
  std::vector<at::Tensor> mine{at::tensor(place_)};
  std::vector<std::vector<at::Tensor>> places(1);
  for (int rank = 0; rank < group_->getSize(); ++rank) places[0].push_back(at::empty_like(mine[0]));
  Interruption::wait(*group_->allgather(places, mine));
  std::map<std::vector<int64_t>, std::string> ranks_in;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    const auto& place = places[0][static_cast<size_t>(rank)];
    auto& ranks = ranks_in[{place[0].item<int64_t>(), place[1].item<int64_t>()}];
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  std::string text;
  for (const auto& [place, ranks] : ranks_in) {
    text += (text.empty() ? " (step " : "; step ") + std::to_string(place[1] + 1) + " of model " +
            std::to_string(place[0]) + " on rank " + ranks;
  }
  return text + "; " + kNumbered + ")";
}

void WindowStatus::arrive_later(size_t window) {
  work_->wait();
  const auto header = at::empty({static_cast<int64_t>(sizeof(Header))}, on_host(wire_.device()));
  header.copy_(wire_.narrow(0, 0, sizeof(Header)), /*non_blocking=*/true);
  const auto model = static_cast<size_t>(place_[0]);
  arriving_.push_back({window, model, wire_.device(), header, Moment::without_time(wire_.device())});
}

std::optional<WindowStatus::Failure> WindowStatus::take_late_failure() {
  // During a capture no event may be queried.
  while (!arriving_.empty() && !is_capturing(arriving_.front().device) && arriving_.front().copied.has_passed()) {
    const auto arrived = std::move(arriving_.front());
    arriving_.pop_front();
    if (header_in(arrived.on_host.const_data_ptr()).not_finite.is_set()) late_not_finite_ = arrived.window;
    if (auto what = trouble(arrived.on_host.const_data_ptr())) {
      // Ranks learn of it at different times, so each says only where it was itself.
      if (header_in(arrived.on_host.const_data_ptr()).is_mixed()) {
        *what += " (it was that of model " + std::to_string(arrived.model) + " here; " + kNumbered + ")";
      }
      return Failure{arrived.window, std::move(*what)};
    }
  }
  return std::nullopt;
}

void WindowStatus::reset() {
  work_.reset();
  wire_.reset();
  failed_.reset();
  not_finite_ = false;
  used_.clear();
}

}  // namespace fastddp
