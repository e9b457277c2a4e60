// The exchange that fastddp runs itself.
#pragma once

#include <memory>
#include <vector>

#include "pipeline/exchange.h"
#include "pipeline/route.h"

namespace fastddp {

// Note [A route for each bucket]
// Each bucket travels by one of several routes over the same ranks. Every tick calls all routes, in the same order on all ranks.
// The route that carries the tick's bucket begins it. The others continue with later legs and rounds of their buckets. So the
// order of all collectives depends only on the plan and on which route carries which bucket. A bucket counts as started when the
// slowest route would have started it, since buckets end in the plan's order.
class Pipeline : public Exchange {
 public:
  // All buckets are encoded by `codec` and sent by `transport`.
  Pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport);
  // Bucket b travels as `pipelines[of_buckets[b]]` would send it.
  static std::unique_ptr<Pipeline> per_bucket(const std::vector<std::shared_ptr<Pipeline>>& pipelines,
                                              std::vector<size_t> of_buckets);
  // The ranks of a node add up their gradients. `outer` sends the sums to the ranks in the same place of other nodes. The result
  // goes to all ranks of the node: note [Two levels of a bucket], codec/node_codec.cpp. `remembers`: `outer` depends on earlier
  // windows, and needs an average over nodes, not a sum. `spreads`: false where gradients are sharded over the node.
  static std::unique_ptr<Pipeline> two_levels(const Pipeline& outer, const std::shared_ptr<Sharding>& shards,
                                              const c10::intrusive_ptr<c10d::ProcessGroup>& all, const Lanes& node,
                                              bool remembers, bool spreads);

  // Gradients travel as `whole` would send them, but each rank gets its own run alone: note [Sharded gradients],
  // bucket/own_shard.h. ValueError: it sends several legs, or by a transport that has no half.
  static std::unique_ptr<Pipeline> sharded(const Pipeline& whole, const std::shared_ptr<Sharding>& sharding);

  void set_weighting(const Weighting& weighting) override;
  c10d::ProcessGroup* group() const override { return group_.get(); }
  c10d::ProcessGroup* lane(size_t number) const override;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups() const override;
  std::optional<size_t> status_tick() const override { return last_route().status_tick(); }
  void status_is_written_by(WriteStatus write) override;
  Status take_status() override { return last_route().take_status(); }
  double scale() const override { return weighting_.scale(group_->getSize()); }
  size_t lag() const override;
  void prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) override;
  void on_gradient(Bucket& bucket, size_t member) override { of(bucket).on_gradient(bucket, member); }
  // If a route raised, its next call starts only the rest, because it counts what it has started.
  void tick(size_t tick) override;
  bool arrived(const Bucket& bucket) override { return of(bucket).arrived(bucket); }
  void when_arrived(const Bucket& bucket, std::function<void()> call) override {
    of(bucket).when_arrived(bucket, call);
  }
  void finish(Bucket& bucket) override { of(bucket).finish(bucket); }
  void let_wires_go() override;
  void discard(Bucket& bucket, size_t member) override { of(bucket).codec()->discard(bucket, member); }
  void keep() override;
  void undo(const at::Tensor& only_if) override;
  const std::vector<at::Tensor>& measure(Bucket& bucket) override { return of(bucket).codec()->measure(bucket); }
  std::function<void()> start_late(Bucket& bucket) override;
  void abandon(size_t tick, double value) override;
  void recover(Bucket& bucket) override { of(bucket).recover(bucket); }
  void drain() override;

 private:
  Pipeline(std::vector<std::shared_ptr<Route>> routes, std::vector<size_t> of_buckets,
           c10::intrusive_ptr<c10d::ProcessGroup> group);

  Route& of(const Bucket& bucket) const { return *routes_[of_buckets_.empty() ? 0 : of_buckets_.at(bucket.index())]; }
  // Of the last bucket.
  Route& last_route() const { return *routes_[of_buckets_.empty() ? 0 : of_buckets_.back()]; }
  Route::Share share_of(size_t route, size_t buckets) const;
  void check_fits() const;

  const std::vector<std::shared_ptr<Route>> routes_;
  const std::vector<size_t> of_buckets_;  // numbers of routes; empty: the first one has all buckets
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  Weighting weighting_;
  bool fits_ = false;  // the routes were made for these buckets
};

}  // namespace fastddp
