#include "pipeline/pipeline.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fastddp {

Pipeline::Pipeline(std::shared_ptr<Codec> codec, std::shared_ptr<Transport> transport)
    : Pipeline({std::make_shared<Route>(codec, std::vector(codec->legs(), transport))}, {},
               transport->lanes().all().front()) {}

Pipeline::Pipeline(std::vector<std::shared_ptr<Route>> routes, std::vector<size_t> of_buckets,
                   c10::intrusive_ptr<c10d::ProcessGroup> group)
    : routes_(std::move(routes)), of_buckets_(std::move(of_buckets)), group_(std::move(group)) {}

std::unique_ptr<Pipeline> Pipeline::per_bucket(const std::vector<std::shared_ptr<Pipeline>>& pipelines,
                                               std::vector<size_t> of_buckets) {
  TORCH_CHECK_VALUE(!pipelines.empty(), "fastddp: no pipeline to carry the buckets");
  const auto& group = pipelines.front()->group_;
  std::vector<std::shared_ptr<Route>> routes;
  for (const auto& pipeline : pipelines) {
    TORCH_CHECK_VALUE(pipeline->group_ == group,
                      "fastddp: pipelines that share buckets go over one process group, and number ", routes.size(),
                      " goes over another one than number 0");
    TORCH_CHECK_VALUE(pipeline->routes_.size() == 1,
                      "fastddp: a pipeline that shares buckets has one route, and number ", routes.size(), " has ",
                      pipeline->routes_.size());
    routes.push_back(pipeline->routes_.front());
  }
  for (const auto owner : of_buckets) {
    TORCH_CHECK_VALUE(owner < routes.size(), "fastddp: there is no pipeline ", owner, " among ", routes.size());
  }
  return std::unique_ptr<Pipeline>(new Pipeline(std::move(routes), std::move(of_buckets), group));
}

std::unique_ptr<Pipeline> Pipeline::two_levels(const Pipeline& outer, const std::shared_ptr<Sharding>& shards,
                                               const c10::intrusive_ptr<c10d::ProcessGroup>& all, const Lanes& node,
                                               bool remembers, bool spreads) {
  const auto ranks = static_cast<int64_t>(all->getSize()), ranks_of_node = node.ranks();
  TORCH_CHECK_VALUE(static_cast<size_t>(ranks_of_node) == shards->ranks(), "fastddp: shards for ", shards->ranks(),
                    " ranks of a node of ", ranks_of_node);
  const auto cut = runs_of(shards);
  const auto times = remembers ? static_cast<double>(ranks) / ranks_of_node : 1.0;
  std::vector<std::shared_ptr<Route>> routes;
  for (const auto& route : outer.routes_) {
    route->set_weighting({remembers ? Weighting::Kind::mean : Weighting::Kind::sum});
    std::vector<std::shared_ptr<Transport>> transports{make_shard_sum(
        node, shards->device(), cut, {.own_sums = false, .ranks = ranks, .times = times, .is_last = !spreads})};
    std::ranges::copy(route->transports(), std::back_inserter(transports));
    if (spreads) transports.push_back(make_shard_spread(node, shards->device(), cut));
    auto codec = make_node_codec(route->codec(), shards, remembers, spreads);
    routes.push_back(std::make_shared<Route>(std::move(codec), std::move(transports)));
  }
  return std::unique_ptr<Pipeline>(new Pipeline(std::move(routes), outer.of_buckets_, all));
}

std::unique_ptr<Pipeline> Pipeline::sharded(const Pipeline& whole, const std::shared_ptr<Sharding>& sharding) {
  const auto cut = runs_of(sharding);
  std::vector<std::shared_ptr<Route>> routes;
  for (const auto& route : whole.routes_) {
    std::shared_ptr<Transport> transport = route->transports().front()->only_sum(sharding->device(), cut);
    TORCH_CHECK_VALUE(transport != nullptr && route->codec()->legs() == 1,
                      "fastddp: a sharded optimizer takes gradients that travel in one leg, by a sum that has halves");
    routes.push_back(std::make_shared<Route>(make_shard_codec(route->codec(), sharding), std::vector{transport}));
  }
  return std::unique_ptr<Pipeline>(new Pipeline(std::move(routes), whole.of_buckets_, whole.group_));
}

void Pipeline::set_weighting(const Weighting& weighting) {
  weighting_ = weighting;
  for (const auto& route : routes_) route->set_weighting(weighting);
}

void Pipeline::status_is_written_by(WriteStatus write) {
  for (const auto& route : routes_) route->status_is_written_by(write);
}

// Null if any route sends something else than collectives.
c10d::ProcessGroup* Pipeline::lane(size_t number) const {
  const auto sends_collectives = [](const auto& route) {
    return std::ranges::all_of(route->transports(), &Transport::sends_collectives);
  };
  if (!std::ranges::all_of(routes_, sends_collectives)) return nullptr;
  for (const auto& route : routes_) {
    if (auto* const lane = route->transports().front()->lanes().at(number)) return lane;
  }
  return nullptr;
}

std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> Pipeline::groups() const {
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> all{group_};
  for (const auto& route : routes_) {
    for (const auto& transport : route->transports())
      std::ranges::copy(transport->lanes().all(), std::back_inserter(all));
  }
  return all;
}

size_t Pipeline::lag() const {
  return std::ranges::max(routes_, {}, &Route::lag)->lag();
}

void Pipeline::prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) {
  const auto codec_fits = [&](const auto& route) { return route->codec()->fits(buckets); };
  fits_ = (of_buckets_.empty() || of_buckets_.size() == buckets.size()) && std::ranges::all_of(routes_, codec_fits);
  if (!fits_) return;  // another exchange is made for these buckets
  for (size_t route = 0; route < routes_.size(); ++route) {
    routes_[route]->prepare(buckets, side_streams, slabs, share_of(route, buckets.size()));
  }
}

Route::Share Pipeline::share_of(size_t route, size_t buckets) const {
  Route::Share share{std::vector<bool>(buckets, of_buckets_.empty()), route, routes_.size()};
  for (size_t bucket = 0; bucket < of_buckets_.size(); ++bucket) share.carries[bucket] = of_buckets_[bucket] == route;
  return share;
}

void Pipeline::check_fits() const {
  TORCH_CHECK(fits_, "fastddp: how each bucket travels was chosen for other buckets");
}

void Pipeline::tick(size_t tick) {
  check_fits();
  for (const auto& route : routes_) route->tick(tick);
}

void Pipeline::let_wires_go() {
  for (const auto& route : routes_) route->let_wires_go();
}

void Pipeline::keep() {
  for (const auto& route : routes_) route->codec()->keep();
}

void Pipeline::undo(const at::Tensor& only_if) {
  for (const auto& route : routes_) route->codec()->undo(only_if);
}

std::function<void()> Pipeline::start_late(Bucket& bucket) {
  bucket.wire.tensor().mul_(scale());
  return [work = Lanes({group_}).start_sum(bucket.wire.tensor())] { Interruption::wait(*work); };
}

void Pipeline::abandon(size_t tick, double value) {
  check_fits();
  for (const auto& route : routes_) route->abandon(tick, value);
}

void Pipeline::drain() {
  for (const auto& route : routes_) route->drain();
}

}  // namespace fastddp
