// A codec of one's own: a random share of each bucket travels, the same elements on all ranks. The rest waits in an error
// (Stich et al., 2018, "Sparsified SGD with Memory"). docs/design.md says what a codec may know.
// tests/codec/test_example_codec.py runs this.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/utils/pybind.h>

#include "codec/codec.h"
#include "codec/kept.h"

namespace {

using fastddp::Bucket;

class RandomK : public fastddp::Codec {
 public:
  // One of `k` elements travels; the seed is the same on all ranks.
  RandomK(int64_t k, int64_t seed) : k_(k), seed_(seed) {}

  void prepare(const std::vector<Bucket*>& buckets, const std::vector<int64_t>&) override {
    parts_.assign(buckets.empty() ? 0 : buckets.front()->layout.count(), {});
    for (auto* bucket : buckets) {
      bucket->wire.disable();  // gradients stay where autograd puts them
      const auto options = at::TensorOptions().dtype(bucket->layout.gradient_dtype()).device(bucket->device());
      parts_[bucket->index()].error = at::zeros({bucket->layout.numbers()}, options);
      parts_[bucket->index()].kept = at::zeros({bucket->layout.numbers()}, options);
    }
  }

  std::optional<Format> format(size_t, const Bucket& bucket) const override {
    return Format{bucket.layout.gradient_dtype(), (bucket.layout.numbers() + k_ - 1) / k_};
  }

  void place(size_t, const Bucket& bucket, const at::Tensor& wire, const at::Tensor&) override {
    parts_[bucket.index()].wire = wire;
  }

  void displace(const Bucket& bucket) override { parts_[bucket.index()].wire.reset(); }

  void on_gradient(Bucket&, size_t, double) override {}

  void encode(size_t, Bucket& bucket, double scale) override {
    bucket.wait_for_gradients();
    auto& part = parts_[bucket.index()];
    if (!std::exchange(part.is_kept, true)) part.kept.copy_(part.error);
    part.error.add_(flat_gradients(bucket));
    part.chosen = choose(bucket, part.windows);
    part.wire.copy_(part.error.index_select(0, part.chosen)).mul_(scale);
  }

  void decode(Bucket& bucket) override {
    auto& part = parts_[bucket.index()];
    auto result = at::zeros_like(part.error).index_copy_(0, part.chosen, part.wire);
    part.error.index_fill_(0, part.chosen, 0.0);
    write(bucket, result);
    recover(bucket);
  }

  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return bucket.measure_gradients(); }

  void fill_void(size_t, const Bucket&, const at::Tensor& place, double value) const override { place.fill_(value); }

  // Each window counts, so that all ranks choose the same elements in the next one.
  void recover(Bucket& bucket) override {
    auto& part = parts_[bucket.index()];
    ++part.windows;
  }

  void keep() override {
    for (auto& part : parts_) part.is_kept = false;
  }

  void undo(const at::Tensor& only_if) override {
    for (auto& part : parts_) {
      if (part.is_kept) fastddp::bring_back(part.error, part.kept, only_if);
      if (!only_if.defined()) part.is_kept = false;
    }
  }

 private:
  struct Part {
    at::Tensor wire;
    at::Tensor error;   // what has not travelled yet; [elements]
    at::Tensor chosen;  // elements that travel in this window
    at::Tensor kept;    // `error` when the step began, once a window has changed it
    bool is_kept = false;
    int64_t windows = 0;
  };

  at::Tensor choose(const Bucket& bucket, int64_t window) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed_ * 1000003 + window * 1009 + bucket.index());
    const auto order = at::randperm(bucket.layout.numbers(), generator, at::TensorOptions().dtype(at::kLong));
    return order.narrow(0, 0, (bucket.layout.numbers() + k_ - 1) / k_).to(bucket.device());
  }

  static at::Tensor flat_gradients(const Bucket& bucket) {
    std::vector<at::Tensor> flat;
    for (size_t member = 0; member < bucket.size(); ++member) {
      const auto& gradient = bucket.gradient(member);
      flat.push_back(gradient.defined() ? gradient.reshape({-1}) : at::zeros_like(bucket.layout[member].like).reshape({-1}));
    }
    return at::cat(flat);
  }

  static void write(Bucket& bucket, const at::Tensor& flat) {
    int64_t offset = 0;
    for (size_t member = 0; member < bucket.size(); ++member) {
      auto& gradient = bucket.gradient_to_write(member);
      gradient.copy_(flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
  }

  const int64_t k_, seed_;
  std::vector<Part> parts_;  // by bucket
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("fastddp._C");  // which knows the base class
  pybind11::class_<RandomK, fastddp::Codec, std::shared_ptr<RandomK>>(m, "RandomK")
      .def(pybind11::init<int64_t, int64_t>(), pybind11::arg("k"), pybind11::arg("seed"));
}
