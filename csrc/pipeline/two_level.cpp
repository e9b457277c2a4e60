#include <algorithm>
#include <utility>

#include "bucket/bucket_range.h"
#include "pipeline/exchange.h"
#include "transport/stages.h"

namespace fastddp {
namespace {

// Note [An exchange of two levels]
// A bucket's wire has the gradients' dtype, and gradients live there as usual. The ranks of the node add up its runs (note
// [Inside a node]). The *outer* exchange goes over the ranks in the same place of other nodes. It has a bucket, the shard, whose
// gradients are parts of this rank's run (note [Shards of a node]). Its result goes back to the ranks of the node.
//
//   tick t: pack bucket t, start its sum inside the node
//           tick t - 1 of the outer exchange, for the sums of bucket t - 1
//           the outer exchange finishes bucket t - 2 - outer lag, and the result is sent to the ranks of the node
//
// So a tick waits only for what all ranks have started in earlier ticks. If the outer exchange sends a bucket's own wire as it
// is, that wire is a part of this one, and nothing is copied.
//
// The averaging factor is applied once, at pack, and the outer exchange adds up. An outer codec with error feedback needs
// averages over nodes, so we multiply by the number of nodes as well.
//
// Note [Inside a node]
// Each rank of the node owns a run of every wire. Runs may differ in length, and may be empty. First each owner gets the sum of
// its run over the ranks of the node, in the wire's dtype (our own sum adds 16 bits up in fp32). Later it sends the result for
// its run to the others.
//
// Note [Two levels of a window that fails]
// Until a rank fails, its outer exchange has taken part with its runs of some buckets. After that, the outer exchange follows
// note [A window that fails], and inside the node the rank sends void wires. Its neighbours compress sums that contain these
// wires, and their codecs remember the loss. So if an exchange remembers, the void wires are zeros, and other ranks notice by
// the status alone. A rank without inputs owes other nodes the sums of its neighbours. It does everything as in any window,
// with zeros for its gradients.
struct Travelling {
  Piece piece;           // its wire: the bucket's, or a void one in its place
  Shards runs;           // of the piece's wire, by rank of the node
  bool is_void = false;  // a void wire travels in the gradients' place
  at::Tensor bound;      // the shard's gradients are parts of this wire
};

// Over the ranks of a node.
std::unique_ptr<Stages> make_stages(c10d::ProcessGroup& node, c10::Device device) {
  const auto level = all_ranks(static_cast<size_t>(node.getSize()), node.getRank());
  return goes_in_pairs(node, device) ? make_pairs(level) : make_collectives(level);
}

class TwoLevel : public Exchange {
 public:
  TwoLevel(std::shared_ptr<Exchange> outer, std::shared_ptr<NodeShards> spans, TwoLevelGroups groups, bool remembers)
      : outer_(std::move(outer)), spans_of_node_(std::move(spans)), groups_(std::move(groups)), remembers_(remembers) {
    TORCH_CHECK_VALUE(static_cast<size_t>(groups_.node->getSize()) == spans_of_node_->ranks(), "fastddp: shards for ",
                      spans_of_node_->ranks(), " ranks of a node of ", groups_.node->getSize());
    outer_->set_average({remembers_ ? Average::Kind::mean : Average::Kind::sum});
  }

  void set_average(const Average& average) override { average_ = average; }

  c10d::ProcessGroup* group() const override { return groups_.all.get(); }

  c10d::ProcessGroup* lane(size_t) const override { return nullptr; }

  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override {
    auto groups = outer_->groups();
    groups.insert(groups.end(), {groups_.all, groups_.node});
    return groups;
  }

  double scale() const override { return average_.scale(groups_.all->getSize()); }

  size_t lag() const override { return outer_->lag() + 2; }

  void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) override {
    buckets_ = &buckets;
    side_streams_ = &side_streams;
    for (auto& bucket : buckets) {
      bucket.set_wire_format(spans_of_node_->format_of(bucket.layout));
      bucket.wire.take_back();  // aliases for another exchange
    }
    fits_ = spans_of_node_->fit(buckets);
    if (!fits_) return;  // another exchange is made for these buckets
    shards_.clear();
    shards_.reserve(buckets.size());
    for (const auto& bucket : buckets) shards_.push_back(spans_of_node_->make_bucket(bucket.index()));
    // Registered memory serves the links of a node. Wires between nodes are mostly parts of these wires.
    for (auto& bucket : buckets) reserve_wire(bucket, *groups_.node, slabs);
    outer_->prepare(shards_, side_streams, nullptr);
    inside_ = make_stages(*groups_.node, buckets.front().device());
    travelling_.assign(buckets.size(), {});
    for (const auto& bucket : buckets) travelling_[bucket.index()].piece.tag = static_cast<uint32_t>(bucket.index());
    forget_window();
  }

  void on_gradient(Bucket& bucket, size_t member) override { bucket.pack_on_arrival(member, scale_inside()); }

  void tick(size_t tick) override {
    TORCH_CHECK(fits_, "fastddp: the shards of nodes were made for other buckets");
    in_window_ = true;
    if (tick < buckets_->size()) {
      auto& bucket = (*buckets_)[tick];
      bucket.pack(scale_inside());
      if (!is_bound(tick, bucket.wire.tensor())) bucket.wire.take_back();
      start_sum(tick, bucket.wire.tensor());
    }
    // So that backward goes on.
    const auto on_side_streams = side_streams_->make_current();
    tick_between_nodes(tick);
    spread(tick);
  }

  bool arrived(const Bucket& bucket) const override {
    return who_waits_.is_the_stream(bucket.device()) || are_done(travelling_[bucket.index()].piece.works);
  }

  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    when_done(travelling_[bucket.index()].piece.works, call);
  }

  void finish(Bucket& bucket) override {
    {
      const BucketRange range("wait", bucket, lag());
      wait(travelling_[bucket.index()].piece);
    }
    bucket.unpack(bucket.wire.tensor());
    forget(bucket);
  }

  // The outer exchange may remember what it sent, so it has to know about each span of the parameter.
  void discard(Bucket& bucket, size_t member) override {
    auto& shard = shards_[bucket.index()];
    for_spans(bucket, member, [&](size_t span) { outer_->discard(shard, span); });
  }

  void keep() override { outer_->keep(); }

  void undo(const at::Tensor& only_if) override { outer_->undo(only_if); }

  std::function<void()> start_late(Bucket& bucket) override {
    bucket.wire.tensor().mul_(scale());
    return [work = Lanes({groups_.all}).start_sum(bucket.wire.tensor())] { Interruption::wait(*work); };
  }

  void abandon(size_t tick, double value) override {
    TORCH_CHECK(fits_, "fastddp: the shards of nodes were made for other buckets");
    in_window_ = true;
    if (tick < buckets_->size() && sums_ == tick) {
      travel_void(tick, remembers_ ? 0.0 : value);
      start_sum(tick, travelling_[tick].piece.wire);
    }
    {
      const auto on_side_streams = side_streams_->make_current();
      was_drained_ ? abandon_between_nodes(tick, value) : tick_between_nodes(tick);
      spread(tick, value);
    }
    // Of a window that failed.
    side_streams_->current_streams_wait();
  }

  void recover(Bucket& bucket) override { forget(bucket); }

  void drain() override {
    for (auto& travelling : travelling_) {
      fastddp::drain(travelling.piece.works);
      travelling.piece.wire.reset();
    }
    outer_->drain();
    was_drained_ = in_window_;
  }

 private:
  double scale_inside() const {
    const auto nodes = static_cast<double>(groups_.all->getSize()) / groups_.node->getSize();
    return remembers_ ? scale() * nodes : scale();
  }

  // ------------------------------------------------------------------------------------------------ inside the node

  void start_sum(size_t index, const at::Tensor& wire) {
    auto& travelling = travelling_[index];
    const BucketRange range("collective", (*buckets_)[index]);
    travelling.piece.wire = wire;
    set_runs(index);
    start(travelling.piece, [&] { inside_->start_sum(0, *groups_.node, travelling.piece, travelling.runs); });
    sums_ = index + 1;
  }

  // A run is the same tensor in every window while the wire is the same: note [Where gradients live], bucket/bucket.h.
  void set_runs(size_t index) {
    auto& travelling = travelling_[index];
    if (is_bound(index, travelling.piece.wire)) return;
    travelling.runs.clear();
    for (const auto& run : spans_of_node_->runs(index)) {
      travelling.runs.push_back(travelling.piece.wire.narrow(0, run.begin, run.length()));
    }
  }

  // With a side stream current. Sends a result after the outer exchange's last tick for its bucket: in each tick for one bucket,
  // or none.
  void spread(size_t tick, std::optional<double> value = std::nullopt) {
    if (tick < lag() || tick - lag() >= shards_.size() || spreads_ > tick - lag()) return;
    const auto index = tick - lag();
    auto& shard = shards_[index];
    if (outer_finished_ == index) {
      ++outer_finished_;
      was_drained_ ? outer_->recover(shard) : outer_->finish(shard);
      // The memory belongs to the bucket's wire, which stays alive without this.
      // Orders no gradients.
      shard.window.kept.let_go();
    }
    auto& travelling = travelling_[index];
    if (was_drained_) travel_void(index, *value);
    const BucketRange range("collective", (*buckets_)[index], lag());
    start(travelling.piece, [&] { inside_->start_spread(1, *groups_.node, travelling.piece, travelling.runs); });
    spreads_ = index + 1;
    // Of a window that failed.
    if (value) wait(travelling.piece);
  }

  template <typename Start>
  void start(Piece& piece, const Start& start) {
    const WithoutPythonObjects without;
    try {
      start();
    } catch (...) {
      piece.sent += piece.works.size();
      throw;
    }
    piece.sent = 0;
  }

  void wait(Piece& piece) {
    const auto works = std::exchange(piece.works, {});
    if (piece.wire.defined()) who_waits_.wait_for(works, piece.wire.device());
  }

  // --------------------------------------------------------------------------------------------- between the nodes

  // With a side stream current.
  void tick_between_nodes(size_t tick) {
    if (tick == 0 || outer_ticks_ >= tick || tick > shards_.size() + outer_->lag()) return;
    const auto index = tick - 1;
    if (index < shards_.size()) {
      auto& travelling = travelling_[index];
      wait(travelling.piece);
      inside_->add_up(travelling.piece, travelling.runs, travelling.runs[spans_of_node_->rank()], nullptr);
      bind(index);
      shards_[index].reset();
      note_placeholders(index);
    }
    outer_->tick(index);
    outer_ticks_ = tick;
    if (index < shards_.size()) note_aliases(index);
  }

  void abandon_between_nodes(size_t tick, double value) {
    if (tick == 0 || outer_ticks_ >= tick || tick > shards_.size() + outer_->lag()) return;
    if (tick <= shards_.size()) wait(travelling_[tick - 1].piece);
    outer_->abandon(tick - 1, value);
    outer_ticks_ = tick;
  }

  // All ranks of the node drop the same placeholders.
  void note_placeholders(size_t index) {
    const auto& bucket = (*buckets_)[index];
    auto& shard = shards_[index];
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (!bucket.window[member].may_be_dropped) continue;
      for_spans(bucket, member, [&](size_t span) { shard.window[span].may_be_dropped = true; });
    }
  }

  // Calls function(member of the shard) for each span of the parameter.
  template <typename Function>
  void for_spans(const Bucket& bucket, size_t member, const Function& function) const {
    const auto& shard = shards_[bucket.index()];
    for (size_t i = 0; i < shard.size(); ++i) {
      if (shard.layout.parameter(i) == bucket.layout.parameter(member)) function(i);
    }
  }

  // Whether the shard's own wire can be this rank's run.
  bool can_share(const Bucket& shard) const {
    const auto length = shard.layout.wire_length();
    const auto& run = spans_of_node_->runs(shard.index())[spans_of_node_->rank()];
    const bool is_alike = shard.layout.format().placing == Placing::aligned && shard.wire.is_home();
    return is_alike && length > 0 && length <= run.length() && spans_of_node_->offsets(shard.index()).front() == 0;
  }

  bool is_bound(size_t index, const at::Tensor& wire) const {
    return travelling_[index].bound.defined() && travelling_[index].bound.is_same(wire);
  }

  // Makes the shard's gradients parts of the wire that travels.
  void bind(size_t index) {
    auto& travelling = travelling_[index];
    if (is_bound(index, travelling.piece.wire)) return;
    auto& shard = shards_[index];
    const auto& own = travelling.runs[spans_of_node_->rank()];
    const bool shares = can_share(shard);
    if (shares) shard.wire.become(shard.layout, own.narrow(0, 0, shard.layout.wire_length()));
    for (size_t i = 0; i < shard.size(); ++i) {
      const auto offset = static_cast<size_t>(spans_of_node_->offsets(index)[i]);
      shard.held(i) = shares ? shard.wire.view(i) : view_of(own, shard.layout[i].like, offset);
    }
    travelling.bound = travelling.piece.wire;
  }

  void note_aliases(size_t index) {
    auto& bucket = (*buckets_)[index];
    auto& travelling = travelling_[index];
    if (travelling.is_void || !bucket.wire.aliases().empty()) return;
    const auto& shard = shards_[index];
    auto aliases = travelling.runs;
    for (size_t i = 0; i < shard.size(); ++i) aliases.push_back(shard.held(i));
    if (can_share(shard)) {
      aliases.push_back(shard.wire.tensor());
      std::ranges::copy(shard.wire.aliases(), std::back_inserter(aliases));
    }
    bucket.wire.hand_out(std::move(aliases));
  }

  // ------------------------------------------------------------------- note [Two levels of a window that fails]

  void travel_void(size_t index, double value) {
    auto& travelling = travelling_[index];
    if (travelling.is_void) return;
    const auto& bucket = (*buckets_)[index];
    travelling.is_void = true;
    travelling.piece.wire = bucket.layout.empty_wire();
    bucket.layout.fill(travelling.piece.wire, value);
    set_runs(index);
  }

  // Called after the last use of the wire that travelled.
  void forget(const Bucket& bucket) {
    auto& travelling = travelling_[bucket.index()];
    if (travelling.is_void) {
      // Of a window that failed.
      keep_for_current_stream(travelling.piece.wire);
      let_go_of_wires(bucket.index());
    }
    travelling.piece.wire.reset();
    travelling.piece.works.clear();
    travelling.piece.sent = 0;
    travelling.is_void = false;
    if (bucket.index() + 1 == buckets_->size()) forget_window();
  }

  // The next window will bind the wire that the bucket has then.
  void let_go_of_wires(size_t index) {
    auto& travelling = travelling_[index];
    auto& shard = shards_[index];
    travelling.runs.clear();
    travelling.bound.reset();
    if (can_share(shard)) shard.wire.drop();
    for (size_t i = 0; i < shard.size(); ++i) shard.held(i).reset();
    (*buckets_)[index].wire.take_back();
  }

  void forget_window() {
    sums_ = outer_ticks_ = outer_finished_ = spreads_ = 0;
    in_window_ = was_drained_ = false;
  }

  const std::shared_ptr<Exchange> outer_;
  const std::shared_ptr<NodeShards> spans_of_node_;
  const TwoLevelGroups groups_;
  const bool remembers_;
  Average average_;
  bool fits_ = false;
  std::unique_ptr<Stages> inside_;  // the node: note [Inside a node]
  std::vector<Bucket>* buckets_ = nullptr;
  const SideStreams* side_streams_ = nullptr;
  std::vector<Bucket> shards_;          // the buckets of the outer exchange
  std::vector<Travelling> travelling_;  // by bucket
  WhoWaits who_waits_;
  // Counts of this window. A call that raised does not count, except outer finish().
  size_t sums_ = 0;            // buckets whose sum inside the node has started
  size_t outer_ticks_ = 0;     // ticks of the outer exchange
  size_t outer_finished_ = 0;  // buckets that the outer exchange has finished
  size_t spreads_ = 0;         // buckets whose result is on its way to the node
  bool in_window_ = false;     // a tick has begun
  bool was_drained_ = false;   // the outer exchange was drained, so it abandons the rest of the window
};

}  // namespace

std::unique_ptr<Exchange> make_two_level(std::shared_ptr<Exchange> outer, std::shared_ptr<NodeShards> shards,
                                         TwoLevelGroups groups, bool remembers) {
  return std::make_unique<TwoLevel>(std::move(outer), std::move(shards), std::move(groups), remembers);
}

}  // namespace fastddp
