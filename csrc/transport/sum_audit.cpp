#include "transport/sum_audit.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "device/streams.h"

namespace fastddp {
namespace {

class Audited : public Transport {
 public:
  Audited(std::shared_ptr<Transport> transport, std::shared_ptr<SumAudit> audit)
      : Transport(transport->lanes()), transport_(std::move(transport)), audit_(std::move(audit)) {}

  void set_weighting(const Weighting& weighting) override {
    Transport::set_weighting(weighting);
    transport_->set_weighting(weighting);
  }

  void set_adder(Adder* adder) override {
    TORCH_CHECK_VALUE(adder == nullptr, "fastddp: only numbers of the wire's dtype can be added up a second time.");
  }

  double scale_before(c10::ScalarType wire) const override { return transport_->scale_before(wire); }

  int64_t unit() const override { return transport_->unit(); }

  size_t rounds() const override { return transport_->rounds(); }
  bool takes_room() const override { return transport_->takes_room(); }
  bool sends_collectives() const override { return transport_->sends_collectives(); }

  std::vector<at::Tensor> split(const at::Tensor& wire) const override { return transport_->split(wire); }

  void start(size_t round, c10d::ProcessGroup& lane, Piece& piece) const override {
    if (round == 0 && piece.sent == 0) audit_->note_sent(piece);
    transport_->start(round, lane, piece);
  }

  void add_up(size_t round, Piece& piece) const override { transport_->add_up(round, piece); }

  void note_came(const Piece& piece) const override {
    transport_->note_came(piece);
    audit_->note_came(piece, factor_of_collective(piece.wire.scalar_type()));
  }

 private:
  double factor_of_collective(c10::ScalarType wire) const {
    const auto before = scale_before(wire);
    return before == scale() ? 1.0 : scale() / before;
  }

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<SumAudit> audit_;
};

}  // namespace

void SumAudit::ask(size_t wire, int64_t begin, int64_t end) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(0 <= begin && begin < end, "fastddp: there are no elements from ", begin, " to ", end);
  asked_ = true;
  wire_ = wire;
  begin_ = begin;
  end_ = end;
  sent_ = came_ = {};
}

std::optional<SumAudit::Copies> SumAudit::take() {
  const std::lock_guard lock(mutex_);
  const bool is_there = std::exchange(asked_, false) && is_complete(sent_) && is_complete(came_);
  const auto sent = std::exchange(sent_, {}), came = std::exchange(came_, {});
  if (!is_there) return std::nullopt;
  // Orders no gradients.
  keep_for_current_stream(sent.elements);
  // Orders no gradients.
  keep_for_current_stream(came.elements);
  return Copies{sent.elements, came.elements, factor_};
}

// A window may begin again over the same forward. The copies of the first time stay.
void SumAudit::note_sent(const Piece& piece) {
  const std::lock_guard lock(mutex_);
  if (asked_ && !is_complete(sent_)) copy_part(piece, sent_);
}

void SumAudit::note_came(const Piece& piece, double factor) {
  const std::lock_guard lock(mutex_);
  if (!asked_ || !is_complete(sent_) || is_complete(came_)) return;
  copy_part(piece, came_);
  factor_ = factor;
}

void SumAudit::copy_part(const Piece& piece, Copy& copy) const {
  if (piece.bucket != wire_) return;
  const auto first = piece.wire.storage_offset();  // a wire has its own storage
  const auto begin = std::max(begin_, first), end = std::min(end_, first + piece.wire.numel());
  if (begin >= end) return;
  if (!copy.elements.defined()) copy.elements = at::empty({end_ - begin_}, piece.wire.options());
  copy.elements.narrow(0, begin - begin_, end - begin).copy_(piece.wire.narrow(0, begin - first, end - begin));
  copy.count += end - begin;
}

std::unique_ptr<Transport> make_audited(std::shared_ptr<Transport> transport, std::shared_ptr<SumAudit> audit) {
  return std::make_unique<Audited>(std::move(transport), std::move(audit));
}

}  // namespace fastddp
