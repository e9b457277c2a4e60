// Lanes: one or more process groups of the same ranks. Collectives are dealt over them in turn.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "transport/works.h"

namespace fastddp {

// By rank: its process, if this rank may read its memory, else 0. Empty: no rank may. Note [Reads], reads.h.
using Processes = std::vector<int>;

constexpr uint32_t kMostPieces = 256;  // of one wire

class Lanes {
 public:
  explicit Lanes(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, Processes processes = {})
      : groups_(std::move(groups)), processes_(std::move(processes)) {
    TORCH_CHECK_VALUE(!groups_.empty(), "fastddp: no process group to exchange gradients over");
  }

  int64_t ranks() const { return groups_.front()->getSize(); }

  c10d::ProcessGroup* first() const { return groups_.front().get(); }

  const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& all() const { return groups_; }

  const Processes& processes() const { return processes_; }

  // Null: there are fewer lanes.
  c10d::ProcessGroup* at(size_t number) const { return number < groups_.size() ? groups_[number].get() : nullptr; }

  // The lane of the bucket's collective `number`. It depends on the plan alone.
  c10d::ProcessGroup& of(size_t bucket, size_t number) const { return *groups_[(bucket + number) % groups_.size()]; }

  // The pieces of a wire, one collective each. With several lanes, a long wire is dealt over them in pieces. Else a bucket with
  // one very large parameter would keep one lane busy at the end of backward, while the other lanes idle. Wires and pieces are
  // multiples of `unit` elements.
  std::vector<at::Tensor> split(const at::Tensor& wire, int64_t unit = 1, int64_t piece_bytes = 25 << 20) const {
    const auto all = std::max<int64_t>(1, static_cast<int64_t>(wire.nbytes()));
    return cut(wire, unit, groups_.size() == 1 ? all : piece_bytes);
  }

  // Cuts the wire into as many equal pieces of at least `least_bytes` as it has. A single piece is a new tensor too.
  static std::vector<at::Tensor> cut(const at::Tensor& wire, int64_t unit, int64_t least_bytes) {
    const auto bytes = static_cast<int64_t>(wire.nbytes());
    const auto pieces = std::clamp<int64_t>(bytes / least_bytes, 1, kMostPieces);
    const auto units = wire.numel() / unit;
    const auto units_in_a_piece = std::max<int64_t>(1, (units + pieces - 1) / pieces);
    return wire.split(units_in_a_piece * unit);
  }

  // Starts a sum of `tensor` over ranks, in place.
  c10::intrusive_ptr<c10d::Work> start_sum(const at::Tensor& tensor) const {
    const WithoutPythonObjects without;
    std::vector<at::Tensor> tensors{tensor};
    return groups_.front()->allreduce(tensors);
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  Processes processes_;
};

}  // namespace fastddp
