// A codec whose wires ranks add up by Codec::add(): gradients in fp32, as bytes. tests/codec/test_example_codec.py runs it.
#include <torch/csrc/utils/pybind.h>

#include "codec/codec.h"
#include "codec/rows.h"

namespace {

using namespace fastddp;

class Adds : public Codec {
 public:
  explicit Adds(bool keeps_sent) : keeps_sent_(keeps_sent) {}

  std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t) override {
    std::vector<std::vector<Leg>> legs;
    for (auto& spans : buckets) {
      spans.place(1, 1);
      legs.push_back({{.dtype = at::kByte, .elements = spans.numbers * 4, .keeps_sent = keeps_sent_, .adds_unit = 4}});
    }
    return legs;
  }

  void encode(size_t, const Spans& spans, Numbers which, Wires wires, double scale) override {
    Rows rows;
    for (const auto number : which) {
      const auto& span = spans.all[number];
      place_of(wires[0].tensor(), span).copy_(rows.of(span, at::kFloat, /*is_read=*/true)).mul_(scale);
    }
  }

  void add(size_t, int64_t, const std::vector<at::Tensor>& shards, const at::Tensor& target) override {
    auto sum = shards.front().view(at::kFloat).clone();
    for (size_t i = 1; i < shards.size(); ++i) sum.add_(shards[i].view(at::kFloat));
    target.view(at::kFloat).copy_(sum);
  }

  Seen decode(const Spans& spans, Wires wires, bool) override {
    Rows rows;
    for (const auto& span : spans.all) rows.of(span, at::kFloat, /*is_read=*/false).copy_(place_of(wires[0].sum(), span));
    rows.write_back();
    return {{}, {wires[0].sum().view(at::kFloat)}};
  }

  void fill_void(size_t, size_t, const at::Tensor& place, double value) const override { place.view(at::kFloat).fill_(value); }

 private:
  static at::Tensor place_of(const at::Tensor& wire, const Span& span) {
    return wire.view(at::kFloat).narrow(0, span.offset, span.length());
  }

  const bool keeps_sent_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("fastddp._C");
  pybind11::class_<Adds, Codec, std::shared_ptr<Adds>>(m, "Adds").def(pybind11::init<bool>(), pybind11::arg("keeps_sent"));
}
