#include "audit/digests.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "device/streams.h"

namespace fastddp {
namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kColumns = 4096;
constexpr int64_t kRows = 256;
constexpr int64_t kBlockWords = kRows * kColumns;

// An odd 64-bit number that looks random (splitmix64).
constexpr uint64_t odd_number(uint64_t number) {
  number = (number + 1) * 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return (number ^ (number >> 31)) | 1;
}

constexpr uint64_t factor_of_column(int64_t column) {
  return odd_number(column);
}

uint64_t factor_of_block(int64_t block) {
  return block == 0 ? 1 : odd_number(kColumns + kRows + block);
}

uint64_t factor_of_row(int64_t row) {
  return factor_of_block(row / kRows) * odd_number(kColumns + row % kRows);
}

// Both halves of each column's factor, the lower one signed. CPUs have vector instructions for 32-bit products, and two of them
// make one of 64 bits.
struct Halves {
  std::array<int32_t, kColumns> low;
  std::array<uint32_t, kColumns> high;
};

constexpr Halves kHalvesOfColumns = [] {
  Halves halves{};
  for (int64_t column = 0; column < kColumns; ++column) {
    const auto factor = factor_of_column(column);
    halves.low[column] = static_cast<int32_t>(factor);
    halves.high[column] = static_cast<uint32_t>((factor - static_cast<uint64_t>(halves.low[column])) >> 32);
  }
  return halves;
}();

// Words are signed, as int32 is on devices.
[[gnu::always_inline]] inline uint64_t sum_of_words(const uint8_t* data, int64_t count) {
  const auto& [low, high] = kHalvesOfColumns;
  uint64_t low_sum = 0;
  uint32_t high_sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t word;
    std::memcpy(&word, data + i * kWordBytes, kWordBytes);
    low_sum += static_cast<uint64_t>(static_cast<int64_t>(word) * low[i]);
    high_sum += static_cast<uint32_t>(word) * high[i];
  }
  return low_sum + (static_cast<uint64_t>(high_sum) << 32);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t sum_of_words_avx2(const uint8_t* data, int64_t count) {
  return sum_of_words(data, count);
}
#endif

// Sums at most kColumns words. The last one may have fewer bytes than the others.
uint64_t sum_of_row(const uint8_t* data, int64_t bytes) {
  const auto whole = bytes / kWordBytes;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  const auto sum = has_avx2 ? sum_of_words_avx2(data, whole) : sum_of_words(data, whole);
#else
  const auto sum = sum_of_words(data, whole);
#endif
  const auto rest = bytes % kWordBytes;
  if (rest == 0) return sum;
  int32_t word = 0;
  std::memcpy(&word, data + whole * kWordBytes, rest);
  return sum + factor_of_column(whole) * static_cast<uint64_t>(word);
}

uint64_t digest_on_cpu(const uint8_t* data, int64_t size) {
  constexpr int64_t row_bytes = kColumns * kWordBytes;
  std::atomic<uint64_t> digest = 0;
  at::parallel_for(0, (size + row_bytes - 1) / row_bytes, 64, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (auto row = begin; row < end; ++row) {
      const auto first = row * row_bytes;
      sum += factor_of_row(row) * sum_of_row(data + first, std::min(row_bytes, size - first));
    }
    digest += sum;
  });
  return digest;
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor bytes_of(const Slice& slice) {
  const auto elements = dense(slice.tensor).view({-1});
  return elements.narrow(0, slice.begin, slice.end - slice.begin).view(at::kByte);
}

// Copies bytes that cannot be read as words where they are.
at::Tensor words_of(const at::Tensor& bytes) {
  const auto rest = bytes.numel() % kWordBytes;
  if (rest != 0) return at::constant_pad_nd(bytes, {0, kWordBytes - rest}).view(at::kInt);
  return (bytes.storage_offset() % kWordBytes == 0 ? bytes : bytes.clone()).view(at::kInt);
}

}  // namespace

// Slices on one device, in order, with no more words than there are factors: five kernels for all of them. Sums up to the end of
// each slice wrap around, and so do the differences between them.
class Digests::Batch {
 public:
  Batch(const at::Tensor& factors, const at::Tensor& digests) : factors_(factors), digests_(digests) {}

  void add(int64_t index, const at::Tensor& bytes) {
    const auto words = words_of(bytes);
    for (int64_t begin = 0; begin < words.numel(); begin += kBlockWords) {
      const auto count = std::min(kBlockWords, words.numel() - begin);
      if (words_ + count > kBlockWords || begin > 0 || index != first_ + static_cast<int64_t>(ends_.size())) flush();
      if (ends_.empty()) first_ = index;
      parts_.push_back(words.narrow(0, begin, count));
      factors_of_parts_.push_back(factors_.narrow(0, 0, count));
      words_ += count;
      ends_.push_back(words_);
      if (begin > 0) flush(factor_of_block(begin / kBlockWords));
    }
  }

  void flush(uint64_t factor = 1) {
    if (ends_.empty()) return;
    const auto products = at::cat(factors_of_parts_).mul_(at::cat(parts_));
    const auto sums = at::cumsum(products, 0);
    std::vector<at::Tensor> at_ends;
    for (const auto end : ends_) at_ends.push_back(sums.select(0, end - 1));
    const auto ends = at::stack(at_ends);
    const auto count = static_cast<int64_t>(ends_.size());
    auto digests = ends.clone();
    digests.narrow(0, 1, count - 1).sub_(ends.narrow(0, 0, count - 1));
    if (factor != 1) digests.mul_(static_cast<int64_t>(factor));
    digests_.narrow(0, first_, count).add_(digests.to(digests_.device(), /*non_blocking=*/true));
    parts_.clear();
    factors_of_parts_.clear();
    ends_.clear();
    words_ = 0;
  }

 private:
  const at::Tensor factors_;
  const at::Tensor digests_;
  int64_t first_ = 0;
  int64_t words_ = 0;
  std::vector<at::Tensor> parts_, factors_of_parts_;
  std::vector<int64_t> ends_;
};

const at::Tensor& Digests::factors(c10::Device device) {
  auto& made = factors_[device];
  if (made.defined()) return made;
  const auto on_cpu = at::empty({kRows, kColumns}, at::kLong);
  auto* next = on_cpu.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < kRows; ++row) {
    const auto of_row = factor_of_row(row);
    for (int64_t column = 0; column < kColumns; ++column) *next++ = static_cast<int64_t>(factor_of_column(column) * of_row);
  }
  made = on_cpu.view({-1}).to(device);
  return made;
}

at::Tensor Digests::of(const std::vector<Slice>& slices, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).pinned_memory(has_streams(device));
  const auto on_host = at::zeros({static_cast<int64_t>(slices.size())}, options);
  auto* const digests = reinterpret_cast<uint64_t*>(on_host.mutable_data_ptr<int64_t>());
  std::vector<at::Tensor> elsewhere(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto& [tensor, begin, end] = slices[i];
    if (!tensor.defined()) continue;
    digests[i] = odd_number(end - begin);  // so that a slice of zeros is not a missing one
    if (!tensor.is_cpu()) {
      elsewhere[i] = bytes_of(slices[i]);
      continue;
    }
    const auto size = static_cast<int64_t>(tensor.element_size());
    const auto in_order = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() ? tensor : dense(tensor);
    const auto* const data = static_cast<const uint8_t*>(in_order.const_data_ptr());
    digests[i] += digest_on_cpu(data + begin * size, (end - begin) * size);
  }
  const auto result = device.is_cpu() ? on_host : on_host.to(device, /*non_blocking=*/true);
  std::unordered_map<c10::Device, Batch> batches;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (!elsewhere[i].defined()) continue;
    const auto place = elsewhere[i].device();
    batches.try_emplace(place, factors(place), result).first->second.add(static_cast<int64_t>(i), elsewhere[i]);
  }
  for (auto& [place, batch] : batches) batch.flush();
  return result;
}

}  // namespace fastddp
