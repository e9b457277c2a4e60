#include "window/status.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>

#include "device/cuda_driver.h"
#include "observe/ranges.h"
#include "transport/works.h"

namespace fastddp {
namespace {

constexpr size_t kBits = 16;
constexpr size_t kMost = 65535;  // the greatest Value

constexpr auto kMixed = "met that of another model: the backwards of models have to come in the same order on all ranks";
constexpr auto kNumbered = "models are numbered in the order of their wrappers";

// A number from 0 to 65,535 as it travels, and what is left of it when ranks have added it up.
struct Value {
  float ranks = 0;  // that have set it
  std::array<float, kBits> bits{};

  void set(size_t number) {
    ranks = 1;
    for (size_t i = 0; i < kBits; ++i) bits[i] = static_cast<float>(number >> i & 1);
  }
  bool is_set() const { return ranks > 0; }
  // None: ranks sent different ones.
  std::optional<size_t> get() const {
    size_t number = 0;
    for (size_t i = 0; i < kBits; ++i) {
      if (bits[i] != 0 && bits[i] != ranks) return std::nullopt;
      if (bits[i] != 0) number |= size_t{1} << i;
    }
    return number;
  }
};

struct Header {
  Value failed;      // the rank whose window failed
  Value late;        // the rank that has missed steps
  Value missed;      // how many, and one more
  Value not_finite;  // the rank whose gradients are not finite
  Value model;
  Value scale;  // of losses, folded to 16 bits

  bool is_mixed() const { return model.is_set() && !model.get(); }
};
constexpr auto kOfValue = static_cast<int64_t>(sizeof(Value) / sizeof(float));
constexpr auto kHeader = static_cast<int64_t>(sizeof(Header) / sizeof(float));
constexpr auto kNotFinite = static_cast<int64_t>(offsetof(Header, not_finite) / sizeof(float));
// A wire of complex gradients is pairs of numbers.
static_assert(kHeader == 6 * kOfValue && kHeader % 2 == 0 && kOfValue == 1 + static_cast<int64_t>(kBits));

// Without the roundings of a wire, and of a collective that divides. `sums`: fp32 on the host.
std::vector<float> counts_of(const at::Tensor& sums, double factor) {
  std::vector<float> counts;
  const auto* const numbers = sums.const_data_ptr<float>();
  for (int64_t i = 0; i < sums.numel(); ++i) counts.push_back(static_cast<float>(std::round(numbers[i] * factor)));
  return counts;
}

Header header_in(const std::vector<float>& counts) {
  Header header;
  std::memcpy(static_cast<void*>(&header), counts.data(), sizeof(Header));
  return header;
}

std::string on_rank(const Value& value) {
  const auto rank = value.get();
  return rank ? "rank " + std::to_string(*rank) : "several ranks";
}

std::optional<std::string> trouble(const Header& found) {
  if (found.is_mixed()) return kMixed;
  if (found.failed.is_set()) return "failed on " + on_rank(found.failed);
  if (found.missed.is_set() && !found.missed.get()) {
    return "met another step of other ranks: an earlier backward on " + on_rank(found.late) +
           " has raised before it reached the model, or reached no parameter of it, and that rank is now one step late; it failed "
           "there";
  }
  if (found.scale.is_set() && !found.scale.get()) {
    return "had losses that GradScalers have scaled by different numbers on different ranks (was one loaded from a "
           "checkpoint? load its state on all of them)";
  }
  return std::nullopt;
}

// Pinned for a device with streams: copies to or from pinned memory need no wait of the host.
at::TensorOptions on_host(c10::Device for_device) {
  return at::TensorOptions().dtype(at::kFloat).pinned_memory(has_streams(for_device));
}

}  // namespace

static_assert(kHeader == WindowStatus::kNumbers);

// Uploaded only if it has changed: a rank mostly says the same in every window, and the device has it already.
const at::Tensor& WindowStatus::on_device(const Said& said, c10::Device device) {
  Header header;
  const auto rank = static_cast<size_t>(said.rank);
  if (said.failed) header.failed.set(rank);
  if (said.missed.value_or(0) > 0) header.late.set(rank);
  if (said.missed) header.missed.set(std::min(*said.missed + 1, kMost));
  if (said.not_finite || said.not_finite_count.defined()) header.not_finite.set(rank);
  if (said.scale > 0) {
    const auto bits = std::bit_cast<uint32_t>(said.scale);
    header.scale.set((bits >> kBits) ^ (bits & kMost));
  }
  if (said.model > 0) header.model.set(std::min(said.model, kMost));
  Numbers numbers(static_cast<size_t>(kHeader));
  std::memcpy(numbers.data(), &header, sizeof(Header));
  for (const auto of : said.used) {
    numbers.push_back(of != Used::no);
    numbers.push_back(of == Used::late);
  }
  if (numbers == said_ && said_on_device_.defined()) return said_on_device_;
  const auto count = static_cast<int64_t>(numbers.size());
  const auto mine = at::empty({count}, on_host(device));
  std::ranges::copy(numbers, mine.mutable_data_ptr<float>());
  said_on_device_ = at::empty({count}, at::TensorOptions().dtype(at::kFloat).device(device));
  said_on_device_.copy_(mine, /*non_blocking=*/true);
  said_ = std::move(numbers);
  return said_on_device_;
}

void WindowStatus::write(c10d::ProcessGroup& group, const at::Tensor& place, const Said& said) {
  group_ = &group;
  place_ = {static_cast<int64_t>(said.model), static_cast<int64_t>(said.window)};
  place.copy_(on_device(said, place.device()));
  if (said.not_finite_count.defined()) place.narrow(0, kNotFinite, kOfValue).mul_(said.not_finite_count.gt(0));
}

void WindowStatus::send(c10d::ProcessGroup& group, c10::Device device, const Said& said) {
  const auto elements = kHeader + 2 * static_cast<int64_t>(said.used.size());
  sums_ = at::empty({elements}, at::TensorOptions().dtype(at::kFloat).device(device));
  factor_ = 1.0;
  write(group, sums_, said);
  std::vector<at::Tensor> tensors{sums_};
  const Range range("fastddp.status");
  const WithoutPythonObjects without;
  work_ = group.allreduce(tensors);
}

WindowStatus::Heard WindowStatus::wait() {
  if (work_) Interruption::wait(*work_);
  const auto counts = counts_of(sums_.to(at::kCPU, at::kFloat), factor_);
  const auto header = header_in(counts);
  Heard heard{.failed = trouble(header), .not_finite = header.not_finite.is_set()};
  if (header.is_mixed() && !has_streams(sums_.device())) *heard.failed += who_is_where();
  for (auto i = static_cast<size_t>(kHeader); i < counts.size(); i += 2) {
    const auto yes_or_no = counts[i] > 0 ? Used::yes : Used::no;
    heard.used.push_back(counts[i + 1] > 0 ? Used::late : yes_or_no);
  }
  return heard;
}

// A collective: all ranks have seen that they are not in the same place.
std::string WindowStatus::who_is_where() const {
  std::vector<at::Tensor> mine{at::tensor(place_)};
  std::vector<std::vector<at::Tensor>> places(1);
  for (int rank = 0; rank < group_->getSize(); ++rank) places[0].push_back(at::empty_like(mine[0]));
  const WithoutPythonObjects without;
  Interruption::wait(*group_->allgather(places, mine));
  std::map<std::vector<int64_t>, std::string> ranks_in;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    const auto& place = places[0][static_cast<size_t>(rank)];
    auto& ranks = ranks_in[{place[0].item<int64_t>(), place[1].item<int64_t>()}];
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  std::string text;
  for (const auto& [place, ranks] : ranks_in) {
    text += (text.empty() ? " (step " : "; step ") + std::to_string(place[1] + 1) + " of model " + std::to_string(place[0]) +
            " on rank " + ranks;
  }
  return text + "; " + kNumbered + ")";
}

void WindowStatus::arrive_later(size_t window) {
  if (work_) work_->wait();
  const auto header = at::empty({kHeader}, on_host(sums_.device()));
  header.copy_(sums_.narrow(0, 0, kHeader).to(at::kFloat), /*non_blocking=*/true);
  const auto model = static_cast<size_t>(place_[0]);
  arriving_.push_back({window, model, sums_.device(), header, factor_, DeviceMoment::without_time(sums_.device())});
}

std::optional<WindowStatus::Failure> WindowStatus::take_late_failure() {
  // During a capture no event may be queried.
  while (!arriving_.empty() && !is_capturing(arriving_.front().device) && arriving_.front().copied.has_passed()) {
    const auto arrived = std::move(arriving_.front());
    arriving_.pop_front();
    const auto header = header_in(counts_of(arrived.on_host, arrived.factor));
    if (header.not_finite.is_set()) late_not_finite_ = arrived.window;
    if (auto what = trouble(header)) {
      // Ranks learn of it at different times, so each says only where it was itself.
      if (header.is_mixed()) {
        *what += " (it was that of model " + std::to_string(arrived.model) + " here; " + kNumbered + ")";
      }
      return Failure{arrived.window, std::move(*what)};
    }
  }
  return std::nullopt;
}

void WindowStatus::reset() {
  group_ = nullptr;
  work_.reset();
  sums_.reset();
}

}  // namespace fastddp
