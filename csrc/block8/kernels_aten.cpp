// Block8's kernels from torch's operators: on every device, with many launches. They write the same bits as the other kernels.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "block8/kernels.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

struct FloatBits {
  double largest;
  int64_t mantissa, bias;  // int8: none
};
constexpr std::array<FloatBits, 3> kBits{{{127.0, 0, 0}, {448.0, 3, 7}, {57344.0, 2, 15}}};  // by Block8::Number

// [blocks, block] each: values in units of the scale, fp32, and their bytes.
struct Rounded {
  at::Tensor values, bytes;
};

class AtenBlock8Kernels : public Block8Kernels {
 public:
  explicit AtenBlock8Kernels(Block8 format) : format_(format), bits_(kBits[static_cast<size_t>(format.number)]) {}

  void encode(const std::vector<BlockedGradient>& gradients, const at::Tensor& before, const at::Tensor& error,
              const at::Tensor& wire, double scale, Rounding rounding) override {
    const c10::OptionalDeviceGuard guard(wire.device());
    for (const auto& of : gradients) {
      auto y = in_blocks(of.gradient) * static_cast<float>(scale);
      const auto begin = of.first_block, count = y.size(0);
      const auto of_these = [&](const at::Tensor& all) { return all.view({-1, format_.block}).narrow(0, begin, count); };
      if (before.defined()) y = y + of_these(before);
      const auto left = write(y, wire, begin, rounding, begin * format_.block);
      if (error.defined()) of_these(error).copy_(left);
    }
  }

  void add(const std::vector<at::Tensor>& shards, const at::Tensor& target, const at::Tensor& error, Rounding rounding,
           int64_t first_element) override {
    const c10::OptionalDeviceGuard guard(target.device());
    const auto blocks = target.numel() / format_.group_bytes() * Block8::kBlocks;
    auto sum = at::zeros({blocks, format_.block}, target.options().dtype(at::kFloat));
    for (const auto& shard : shards) sum = sum + read(shard, 0, blocks);
    const auto left = write(sum, target, 0, rounding, first_element);
    if (error.defined()) error.view({-1, format_.block}).add_(left);
  }

  at::Tensor decode(const std::vector<BlockedGradient>& gradients, const at::Tensor& wire) override {
    const c10::OptionalDeviceGuard guard(wire.device());
    std::vector<at::Tensor> measured;
    for (const auto& of : gradients) {
      const auto count = of.gradient.numel();
      const auto values = read(wire, of.first_block, format_.blocks_of(count)).view(-1).narrow(0, 0, count);
      of.gradient.copy_(values);
      measured.push_back(measure_with_operators(of.gradient));
    }
    return measured.empty() ? at::zeros({0, 2}, at::kDouble) : at::stack(measured);
  }

 private:
  // [blocks, block], fp32, padded with zeros.
  at::Tensor in_blocks(const at::Tensor& gradient) const {
    const auto count = gradient.numel(), all = format_.blocks_of(count) * format_.block;
    return at::constant_pad_nd(gradient.to(at::kFloat), {0, all - count}).view({-1, format_.block});
  }

  // The wire's scales, fp32, [groups, 4], and its bytes, [groups, 4, block].
  std::pair<at::Tensor, at::Tensor> parts(const at::Tensor& wire) const {
    const auto groups = wire.view({-1, format_.group_bytes()});
    constexpr auto scale_bytes = Block8::kBlocks * static_cast<int64_t>(sizeof(float));
    const auto scales = groups.narrow(1, 0, scale_bytes).view(at::kFloat);
    return {scales,
            groups.narrow(1, scale_bytes, Block8::kBlocks * format_.block).unflatten(1, {Block8::kBlocks, format_.block})};
  }

  // The indices of blocks [begin, begin + count) in a tensor [groups, 4].
  static std::pair<at::Tensor, at::Tensor> places(int64_t begin, int64_t count, const at::Tensor& wire) {
    const auto blocks = at::arange(begin, begin + count, wire.options().dtype(at::kLong));
    return {blocks.div(Block8::kBlocks, "floor"), blocks.remainder(Block8::kBlocks)};
  }

  at::Tensor read(const at::Tensor& wire, int64_t begin, int64_t count) const {
    const auto [scales, bytes] = parts(wire);
    const auto [group, place] = places(begin, count, wire);
    return values_of(bytes.index({group, place})) * scales.index({group, place}).unsqueeze(1);
  }

  // Returns the rounding error: 0 in a block that is not finite.
  at::Tensor write(const at::Tensor& y, const at::Tensor& wire, int64_t begin, Rounding rounding, int64_t first_element) const {
    const auto magnitude = std::get<0>(y.abs().max(1, /*keepdim=*/true));
    const auto is_finite = magnitude <= 0x1p127f;
    const auto is_zero = magnitude < 0x1p-100f;
    const auto is_written = is_finite.logical_and(is_zero.logical_not());
    const auto largest = at::full({}, bits_.largest, y.options());
    const auto safe = at::where(is_written, magnitude, largest);
    const auto [rounded, bytes] = round(y * (largest / safe), rounding, first_element);
    const auto scale = safe / largest;
    const auto values = at::where(is_written, rounded * scale, 0.0f);
    auto [scales, places_of_bytes] = parts(wire);
    const auto [group, place] = places(begin, y.size(0), wire);
    const auto nan = at::full({}, std::numeric_limits<float>::quiet_NaN(), y.options());
    const auto of_blocks = at::where(is_finite, at::where(is_zero, at::zeros_like(scale), scale), nan);
    scales.index_put_({group, place}, of_blocks.squeeze(1));
    places_of_bytes.index_put_({group, place}, at::where(is_written, bytes, at::zeros_like(bytes)));
    return at::where(is_finite, y - values, 0.0f);
  }

  at::Tensor draws(const at::Tensor& like, Dice dice, int64_t first_element) const {
    constexpr int64_t kAll = 0xffffffff;
    const auto hash = [&](at::Tensor x) {
      x = x.bitwise_xor(x.bitwise_right_shift(16));
      x = (x * 0x7feb352d).bitwise_and(kAll);
      x = x.bitwise_xor(x.bitwise_right_shift(15));
      x = (x * 0x846ca68b).bitwise_and(kAll);
      return x.bitwise_xor(x.bitwise_right_shift(16));
    };
    const auto element = at::arange(like.numel(), like.options().dtype(at::kLong)) + first_element;
    const auto low = static_cast<int64_t>(dice.key & 0xffffffff), high = static_cast<int64_t>(dice.key >> 32);
    const auto random = hash((hash(element.bitwise_and(kAll).bitwise_xor(low)) + high).bitwise_and(kAll));
    return random.bitwise_right_shift(16).to(at::kFloat).mul(0x1p-16f).view_as(like);
  }

  Rounded round(const at::Tensor& x, Rounding rounding, int64_t first_element) const {
    const auto magnitude = x.abs().clamp_max(bits_.largest);
    const auto sign = x.signbit();
    const auto nearest = [&](const at::Tensor& number) {
      return rounding ? (number + draws(x, *rounding, first_element)).floor() : number.round();
    };
    if (format_.number == Block8::Number::int8) {
      const auto k = nearest(magnitude);
      const auto number = at::where(sign, -k, k);
      return {number + 0.0, number.to(at::kChar).view(at::kByte)};
    }
    const auto exponent = magnitude.view(at::kInt).bitwise_right_shift(23).add(bits_.bias - 127).clamp_min(1);
    const auto distance = (exponent - (bits_.bias + bits_.mantissa)).mul(1 << 23).to(at::kInt);
    const auto k = nearest(magnitude * (-distance + (127 << 23)).view(at::kFloat));
    const auto value = k * (distance + (127 << 23)).view(at::kFloat);
    const auto number = (exponent - 1) * (1 << bits_.mantissa) + k.to(at::kInt);
    const auto bytes = at::where(sign, number + 0x80, number).to(at::kByte);
    return {at::where(sign, -value, value), bytes};
  }

  at::Tensor values_of(const at::Tensor& bytes) const {
    if (format_.number == Block8::Number::int8) return bytes.view(at::kChar).to(at::kFloat);
    const auto dtype = format_.number == Block8::Number::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
    return bytes.view(dtype).to(at::kFloat);
  }

  const Block8 format_;
  const FloatBits bits_;
};

}  // namespace

std::unique_ptr<Block8Kernels> make_aten_block8_kernels(Block8 format) {
  return std::make_unique<AtenBlock8Kernels>(format);
}

}  // namespace fastddp
