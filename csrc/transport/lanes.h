// Process groups of the same ranks, at least one, over which collectives are dealt in turn.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

#include "transport/works.h"

namespace fastddp {

constexpr uint32_t kMostPieces = 256;  // of one wire

class Lanes {
 public:
  explicit Lanes(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups) : groups_(std::move(groups)) {
    TORCH_CHECK_VALUE(!groups_.empty(), "fastddp: no process group to exchange gradients over");
  }

  int64_t ranks() const { return groups_.front()->getSize(); }

  c10d::ProcessGroup* first() const { return groups_.front().get(); }

  const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& all() const { return groups_; }

  // Null: there are not so many.
  c10d::ProcessGroup* at(size_t number) const { return number < groups_.size() ? groups_[number].get() : nullptr; }

  // Collective `number` of a bucket's; which lane carries it depends on the plan alone.
  c10d::ProcessGroup& of(size_t bucket, size_t number) const { return *groups_[(bucket + number) % groups_.size()]; }

  // What travels as one collective each. With several lanes, a long wire is dealt over them in pieces: a bucket that one
  // large parameter makes much longer than the others would keep one lane busy at the end of backward, with nothing left
  // for the others. All pieces are multiples of `unit` elements, as the wire is.
  std::vector<at::Tensor> split(const at::Tensor& wire, int64_t unit = 1, int64_t piece_bytes = 25 << 20) const {
    const auto all = std::max<int64_t>(1, static_cast<int64_t>(wire.nbytes()));
    return cut(wire, unit, groups_.size() == 1 ? all : piece_bytes);
  }

  // In as many pieces, as long as each other, as have `least_bytes` at the least. One piece is a tensor of its own too, for a
  // bucket counts its pieces among the references to its wire.
  static std::vector<at::Tensor> cut(const at::Tensor& wire, int64_t unit, int64_t least_bytes) {
    const auto bytes = static_cast<int64_t>(wire.nbytes());
    const auto pieces = std::clamp<int64_t>(bytes / least_bytes, 1, kMostPieces);
    const auto units = wire.numel() / unit;
    const auto units_in_a_piece = std::max<int64_t>(1, (units + pieces - 1) / pieces);
    return wire.split(units_in_a_piece * unit);
  }

  // Starts to add up `tensor` over ranks, in place.
  c10::intrusive_ptr<c10d::Work> start_sum(const at::Tensor& tensor) const {
    const WithoutPythonObjects without;
    std::vector<at::Tensor> tensors{tensor};
    return groups_.front()->allreduce(tensors);
  }

  std::string backend(c10::Device device) const { return groups_.front()->getBackend(device.type())->getBackendName(); }

 private:
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

}  // namespace fastddp
