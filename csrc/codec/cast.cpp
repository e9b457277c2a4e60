#include "bucket/gradient_memory.h"
#include "bucket/layout.h"
#include "codec/codec.h"
#include "pack/kernels.h"

namespace fastddp {
namespace {

class Cast : public Codec {
 public:
  explicit Cast(std::optional<c10::ScalarType> wire) : Codec(/*remembers=*/false), wire_(wire) {}

  std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t owners) override {
    planned_.clear();
    std::vector<std::vector<Leg>> legs;
    for (auto& spans : buckets) {
      const auto dtype = wire_.value_or(spans.dtype);
      spans.place(aligned(dtype), owners);
      for (auto& span : spans.all) span.packs = true;
      planned_.push_back({spans.all, make_kernels(spans.device)});
      legs.emplace_back();
      if (dtype != spans.dtype || spans.needs_wire) legs.back() = {{.dtype = dtype, .elements = spans.numbers}};
    }
    return legs;
  }

  void encode(size_t, const Spans& spans, Numbers which, Wires wires, double scale) override {
    auto& wire = wires.front();
    if (wire.parts.empty()) cut(wire, spans);
    std::vector<Slot> slots;
    slots.reserve(which.size());
    for (const auto number : which) slots.push_back({spans.all[number].gradient, wire.parts[number], number});
    planned_[spans.bucket].kernels->pack(slots, scale, spans.call, spans.sums);
  }

  Seen decode(const Spans& spans, Wires wires, bool are_parts) override {
    const auto& wire = wires.front();
    std::vector<Slot> slots;
    slots.reserve(spans.all.size());
    for (const auto& span : spans.all) {
      slots.push_back({span.gradient, are_parts ? view(wire, span) : wire.parts[span.number]});
    }
    const auto found = planned_[spans.bucket].kernels->unpack(slots, /*measuring=*/true);
    if (found.defined()) return {{found}, {}};
    return are_parts ? Seen() : Seen{{}, {wire.tensor()}};
  }

  void fill_void(size_t, size_t bucket, const at::Tensor& place, double value) const override {
    place.zero_();
    for (const auto& span : planned_[bucket].spans) place.narrow(0, span.offset, span.length()).fill_(value);
  }

 private:
  static at::Tensor view(const Wire& wire, const Span& span) {
    return view_of(wire.tensor(), span.like, static_cast<size_t>(span.offset));
  }

  static void cut(Wire& wire, const Spans& spans) {
    for (const auto& span : spans.all) wire.parts.push_back(view(wire, span));
  }

  struct Planned {
    std::vector<Span> spans;
    std::unique_ptr<Kernels> kernels;
  };

  const std::optional<c10::ScalarType> wire_;
  std::vector<Planned> planned_;  // by bucket
};

}  // namespace

std::shared_ptr<Codec> make_cast(std::optional<c10::ScalarType> wire) {
  return std::make_shared<Cast>(wire);
}

}  // namespace fastddp
