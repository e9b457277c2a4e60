// A codec of one's own: a random share of each bucket travels, the same elements on all ranks. The rest waits in an error
// (Stich et al., 2018, "Sparsified SGD with Memory"). docs/design.md says what a codec may know.
// tests/codec/test_example_codec.py runs this.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/utils/pybind.h>

#include "codec/codec.h"
#include "codec/kept.h"
#include "codec/rows.h"

namespace {

using namespace fastddp;

class RandomK : public Codec {
 public:
  // One of `k` elements travels; the seed is the same on all ranks.
  RandomK(int64_t k, int64_t seed) : k_(k), seed_(seed) {}

  std::vector<std::vector<Leg>> plan(std::vector<Spans>& buckets, int64_t) override {
    parts_.assign(buckets.size(), {});
    std::vector<std::vector<Leg>> legs;
    for (auto& spans : buckets) {
      spans.place(1, 1);
      auto& part = parts_[spans.bucket];
      part.error = at::zeros({spans.numbers}, at::TensorOptions().dtype(spans.dtype).device(spans.device));
      part.kept = at::zeros_like(part.error);
      legs.push_back({{.dtype = spans.dtype, .elements = (spans.numbers + k_ - 1) / k_, .is_whole = true}});
    }
    return legs;
  }

  void encode(size_t, const Spans& spans, Numbers, Wires wires, double scale) override {
    auto& part = parts_[spans.bucket];
    if (!std::exchange(part.is_kept, true)) part.kept.copy_(part.error);
    Rows rows;
    for (const auto& span : spans.all) {
      part.error.narrow(0, span.offset, span.length()).add_(rows.of(span, spans.dtype, /*is_read=*/true));
    }
    part.chosen = choose(spans, part.windows);
    sent(part, wires).copy_(part.error.index_select(0, part.chosen)).mul_(scale);
  }

  Seen decode(const Spans& spans, Wires wires, bool) override {
    auto& part = parts_[spans.bucket];
    const auto result = at::zeros_like(part.error).index_copy_(0, part.chosen, sent(part, wires));
    part.error.index_fill_(0, part.chosen, 0.0);
    Rows rows;
    for (const auto& span : spans.all) {
      rows.of(span, spans.dtype, /*is_read=*/false).copy_(result.narrow(0, span.offset, span.length()));
    }
    rows.write_back();
    recover(spans.bucket, wires);
    return {{}, {result}};
  }

  void fill_void(size_t, size_t, const at::Tensor& place, double value) const override { place.fill_(value); }

  // Each window counts, so that all ranks choose the same elements in the next one.
  void recover(size_t bucket, Wires) override { ++parts_[bucket].windows; }

  void keep() override {
    for (auto& part : parts_) part.is_kept = false;
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& part : parts_) {
      if (part.is_kept) bring_back(part.error, part.kept, only_if);
      if (!only_if.defined()) part.is_kept = false;
    }
  }

 private:
  struct Part {
    at::Tensor error;   // what has not travelled yet; [elements]
    at::Tensor chosen;  // elements that travel in this window
    at::Tensor kept;    // `error` when the step began, once a window has changed it
    bool is_kept = false;
    int64_t windows = 0;
  };

  // A wire may be longer than plan() asks for.
  static at::Tensor sent(const Part& part, Wires wires) { return wires[0].tensor().narrow(0, 0, part.chosen.numel()); }

  at::Tensor choose(const Spans& spans, int64_t window) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_ * 1000003 + window * 1009 + spans.bucket);
    const auto order = at::randperm(spans.numbers, generator, at::TensorOptions().dtype(at::kLong));
    return order.narrow(0, 0, (spans.numbers + k_ - 1) / k_).to(spans.device);
  }

  const int64_t k_, seed_;
  std::vector<Part> parts_;  // by bucket
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("fastddp._C");  // which knows the base class
  pybind11::class_<RandomK, Codec, std::shared_ptr<RandomK>>(m, "RandomK")
      .def(pybind11::init<int64_t, int64_t>(), pybind11::arg("k"), pybind11::arg("seed"));
}
