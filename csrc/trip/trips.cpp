#include "trip/trips.h"

#include <algorithm>
#include <utility>

#include "trip/steps.h"

namespace fastddp {
namespace {

using Travels = std::vector<Travel>;

// --------------------------------------------------------------------------------------- the collectives that a wire goes through

struct Route {
  std::vector<std::shared_ptr<const Collective>> collectives;
  std::function<Shards(const at::Tensor& wire)> pieces;
  int64_t owners = 1;  // wires and pieces are multiples of so many of the units that are added up
  int64_t unit = 1;    // of numbers
};

Halves halves_of(const Way& way, std::shared_ptr<const Owners> owners, Cut cut, int64_t adds_unit) {
  return {std::move(owners), std::move(cut), adds_unit > 0 ? way.codec.get() : nullptr, std::max<int64_t>(1, adds_unit)};
}

// Into how many shards the lanes' ranks cut a wire.
int64_t owners_of(const Way& way) {
  int64_t owners = 1;
  for (const auto& level : way.levels) owners *= static_cast<int64_t>(level.shards);
  return owners;
}

Shards whole(const at::Tensor& wire) {
  return {wire};
}

// `adds_unit`: as in Leg.
Route over_lanes(const Way& way, c10::Device device, int64_t adds_unit) {
  const auto& lanes = *way.lanes;
  if (way.nodes.empty()) {
    return {{make_all_reduce(lanes)}, [lanes](const at::Tensor& wire) { return lanes.split(wire); }};
  }
  Route route;
  route.owners = owners_of(way);
  // On a device 16 bytes of 16-bit numbers, which its kernel reads at a time.
  route.unit = adds_unit > 0 ? adds_unit : has_streams(device) ? 8 : 1;
  std::vector<Halves> halves;
  for (size_t level = 0; level < way.levels.size(); ++level) {
    halves.push_back(halves_of(way, way.level_owners[level], shards_of(way.levels, level), adds_unit));
  }
  size_t round = 0;
  for (const auto& half : halves) route.collectives.push_back(make_to_owners(lanes, half, round++, /*is_last=*/false));
  std::ranges::reverse(halves);
  for (const auto& half : halves) route.collectives.push_back(make_from_owners(lanes, half, round++));
  // While one piece is added up, others travel: on a device over one lane too, since there another stream adds up.
  route.pieces = [lanes, unit = route.owners * route.unit](const at::Tensor& wire) {
    constexpr int64_t piece_bytes = 16 << 20, least_bytes_on_device = 8 << 20;
    if (has_streams(wire.device())) return Lanes::cut(wire, unit, least_bytes_on_device);
    return lanes.split(wire, unit, piece_bytes);
  };
  return route;
}

// To the owners of runs, and no further.
Route to_runs(const Way& way, const Lanes& lanes, c10::Device device, int64_t adds_unit, bool is_last) {
  const auto halves = halves_of(way, way.run_owners, runs_of(way.sharding), adds_unit);
  // On a device messages may be on their way at the same time, as far as the host knows.
  const bool shares_room = goes_in_pairs(*lanes.first(), device) && adds_unit == 0 && lanes.ranks() > 1;
  return {{make_to_owners(lanes, halves, 0, is_last, shares_room)}, whole, 1, halves.unit};
}

// ---------------------------------------------------------------------------------------------------------- formats and wires

// Asks the codec what travels, and sets Travel::legs.
void plan(Travels& travels, Codec& codec, int64_t owners) {
  std::vector<Spans> spans;
  for (const auto& travel : travels) spans.push_back(travel.spans);
  const auto legs = codec.plan(spans, owners);
  for (size_t i = 0; i < travels.size(); ++i) {
    travels[i].spans = std::move(spans[i]);
    travels[i].all = first_numbers(travels[i].spans.all.size());
    travels[i].legs = legs[i];
    travels[i].wires.resize(legs[i].size());
  }
}

int64_t adds_unit_of(const Way& way, const Travels& travels) {
  const auto& legs = travels.front().legs;
  TORCH_CHECK_VALUE(
      legs.empty() || (legs.front().adds_unit == 0 && !legs.front().keeps_sent) || !way.nodes.empty(),
      "fastddp: an allreduce adds up numbers, in place, and this codec's legs need another sum. Name the nodes of "
      "ranks, which then add up themselves.");
  return legs.empty() ? 0 : legs.front().adds_unit;
}

bool is_power_of_two(int64_t number) {
  return (number & (number - 1)) == 0;
}

// Pack scales gradients in fp32 (fp64 for fp64). For the mean, an allreduce may do it instead. It too multiplies by 1/ranks before it
// adds, but in the wire's dtype: for 16 bits only a power of two gives the same values.
bool may_average(const Way& way, const Travel& travel) {
  const auto dtype = travel.legs.empty() ? travel.spans.dtype : travel.legs.front().dtype;
  const bool rounds_alike = c10::elementSize(dtype) >= 4 || is_power_of_two(way.lanes->ranks());
  return way.divides && !way.keeps_runs() && way.nodes.empty() && rounds_alike;
}

// Reserves a place in the slab of the lane that carries the wire's first piece, in this tick. Null: there is none.
WireMemory place_of(Slabs* slabs, const Collective& first, size_t tick, const Bucket& bucket, int64_t bytes, bool twice) {
  if (slabs == nullptr) return nullptr;
  return slabs->reserve(first.lanes.of(tick, 0), bucket.device(), twice ? 2 * bytes : bytes);
}

void set_own_wire(Travel& travel, WireFormat format, const Collective& first, Slabs* slabs) {
  auto& outline = travel.outline;
  outline.set_wire(format);
  const bool stays = outline.keeps_wire && travel.bucket->wire.exists() && travel.bucket->wire.need() == outline.wire;
  if (slabs == nullptr || slabs->are_symmetric() || stays || outline.lends_wire()) return;
  const auto bytes = Slabs::bytes(outline.layout.wire_length(), format.dtype);
  const auto memory = place_of(slabs, first, travel.bucket->index(), *travel.bucket, bytes, first.takes_room);
  outline.set_wire(format, memory, /*has_beside=*/memory != nullptr && first.takes_room);
}

// `tail`: elements after the last leg of the last bucket.
void plan_wires(Travels& travels, const Route& route, const std::optional<Shared>& shared, int64_t tail, Slabs* slabs) {
  for (auto& travel : travels) {
    for (size_t leg = 0; leg < travel.legs.size(); ++leg) {
      const auto& [dtype, elements, keeps_sent, is_whole, adds_unit] = travel.legs[leg];
      if (leg == 1 && host_of(travels, shared, travel.bucket->index()) != nullptr) continue;
      const bool is_last = &travel == &travels.back() && leg + 1 == travel.legs.size();
      auto* const guest = leg == 0 ? guest_of(travels, shared, travel.bucket->index()) : nullptr;
      const auto more = (guest == nullptr ? 0 : guest->legs[1].elements) + (is_last ? tail : 0);
      const auto length = rounded_up(elements + more, route.owners * route.unit);
      const auto& first = *route.collectives.front();
      const auto tick = travel.bucket->index() + (leg == 0 ? 0 : shared->second);
      const bool is_lent = travel.bucket->layout.form().lazy_bucket_allocation;
      const auto memory = place_of(is_lent ? nullptr : slabs, first, tick, *travel.bucket, Slabs::bytes(length, dtype),
                                   keeps_sent || first.takes_room);
      const bool has_beside = keeps_sent || (memory != nullptr && first.takes_room);
      travel.wires[leg].plan(Wire::Need{dtype, travel.bucket->device(), length, has_beside, memory});
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------- stages

void add_stages(Trip& trip, const Route& route, Stage first) {
  first.pieces = route.pieces;
  first.sends = route.collectives.front();
  trip.stages.push_back(first);
  for (size_t i = 1; i < route.collectives.size(); ++i) {
    trip.stages.push_back({.sends = route.collectives[i], .is_relayed = first.is_relayed});
  }
}

// Through the same stages again.
void add_second_leg(Trip& trip, const Route& route, Stage first) {
  const auto of_a_leg = route.collectives.size(), begin = trip.stages.size() - of_a_leg;
  first.leg = 1;
  first.write = encode_again;
  add_stages(trip, route, first);
  trip.shared = Shared{begin, begin + of_a_leg, of_a_leg};
}

std::function<std::function<void()>(Bucket&, double)> late_over(const Way& way) {
  return [group = way.all](Bucket& bucket, double scale) -> std::function<void()> {
    bucket.wire.tensor().mul_(scale);
    return [work = Lanes({group}).start_sum(bucket.wire.tensor())] { Interruption::wait(*work); };
  };
}

// ----------------------------------------------------------------------------------------------------------------------- trips

// Sums of ones are exact up to this number.
int64_t counts_up_to(c10::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) return 0;
  return dtype == at::kBFloat16 ? 256 : 2048;
}

c10::ScalarType last_dtype(const Travel& travel) {
  return travel.legs.empty() ? travel.spans.dtype : travel.legs.back().dtype;
}

// There is, if one collective over all ranks adds up the last bucket's last wire, in a dtype that can count them. A sum in halves may
// fail in the second one: then ranks that have the others' shards would go on. On a device with streams a status of its own
// costs the host nothing.
bool has_room_for_status(const Way& way, const Route& route, const Travel& last) {
  const auto ranks = way.lanes->ranks();
  return route.collectives.size() == 1 && !way.keeps_runs() && ranks > 1 && ranks <= counts_up_to(last_dtype(last)) &&
         !has_streams(last.bucket->device());
}

Trip in_one_level(const Way& way, Travels& travels, Slabs* slabs) {
  const auto device = travels.front().bucket->device();
  for (auto& travel : travels) {
    travel.spans.needs_wire = slabs != nullptr && slabs->are_symmetric() && way.lanes->ranks() > 1;
  }
  plan(travels, *way.codec, owners_of(way));
  const auto adds_unit = adds_unit_of(way, travels);
  const auto route =
      way.keeps_runs() ? to_runs(way, *way.lanes, device, adds_unit, /*is_last=*/true) : over_lanes(way, device, adds_unit);

  Trip trip;
  trip.codec = way.codec;
  trip.has_status = has_room_for_status(way, route, travels.back());
  const auto tail = trip.has_status ? kStatusRoom : 0;
  for (auto& travel : travels) {
    const auto dtype = travel.legs.size() == 1 && adds_unit == 0 ? travel.legs.front().dtype : travel.spans.dtype;
    WireFormat format{dtype, aligned(dtype), route.owners * route.unit, &travel == &travels.back() ? tail : 0};
    travel.legs.empty() ? set_own_wire(travel, format, *route.collectives.front(), slabs)
                        : travel.outline.do_without_wire(format);
    travel.may_average = may_average(way, travel);
    // Where there are no streams.
    const bool packs_on_arrival = travel.bucket->kernels->pack_on_arrival();
    travel.encodes_on_arrival = !travel.legs.empty() && !travel.legs.front().is_whole && packs_on_arrival;
  }

  const Stage first{.write = encode, .leg = 0, .instead = void_own};
  add_stages(trip, route, first);
  if (travels.front().legs.size() > 1) {
    TORCH_CHECK_VALUE(!way.keeps_runs(), "fastddp: a sharded optimizer takes gradients that travel in one leg");
    add_second_leg(trip, route, first);
  }
  plan_wires(travels, route, trip.shared, tail, slabs);
  trip.ends_for_others = way.keeps_runs();
  trip.gradient = encode_on_arrival;
  trip.end = way.keeps_runs() ? decode_mine : decode;
  trip.recover = recover;
  trip.late = late_over(way);
  return trip;
}

// Sets Travel::extent. Returns whether each run can travel where it is, as a part of its bucket's wire.
bool fit_in_runs(Travels& travels, const Sharding& sharding, int64_t unit) {
  bool fit = true;
  for (auto& travel : travels) {
    const auto& spans = sharding.spans(travel.bucket->index());
    const auto begin = spans.front().offset, end = spans.back().offset + spans.back().length();
    travel.extent = {begin, rounded_up(end - begin, unit)};
    fit = fit && (!travel.legs.empty() || begin + travel.extent.second <= sharding.run(travel.bucket->index()).end);
  }
  return fit;
}

Trip in_two_levels(const Way& way, Travels& travels, Slabs* slabs) {
  const auto device = travels.front().bucket->device();
  const auto& sharding = way.sharding;
  for (auto& travel : travels) {
    travel.spans.grid = {sharding->grid().member, 1};
    travel.spans.all = sharding->spans(travel.bucket->index());
  }
  plan(travels, *way.codec, owners_of(way));
  const auto between = over_lanes(way, device, adds_unit_of(way, travels));
  if (!fit_in_runs(travels, *sharding, between.owners * between.unit)) {
    for (auto& travel : travels) travel.spans.needs_wire = true;
    plan(travels, *way.codec, owners_of(way));
  }
  const auto to_node = to_runs(way, *way.node, device, 0, /*is_last=*/way.keeps_runs());
  for (auto& travel : travels) {
    set_own_wire(travel, sharding->format_of(travel.outline.layout), *to_node.collectives.front(), slabs);
  }

  Trip trip;
  trip.codec = way.codec;
  add_stages(trip, to_node, {.write = pack_own, .instead = void_to_node});
  const Stage run{.write = encode_run, .leg = 0, .instead = void_run, .is_relayed = true};
  add_stages(trip, between, run);
  if (travels.front().legs.size() > 1) add_second_leg(trip, between, run);
  plan_wires(travels, between, trip.shared, 0, nullptr);
  if (!way.keeps_runs()) {
    const Route from_node{{make_from_owners(*way.node, {way.run_owners, runs_of(way.sharding)}, 1)}, whole};
    add_stages(trip, from_node, {.write = decode_run, .instead = void_own, .is_relayed = true});
  }
  trip.times = way.codec->remembers ? static_cast<double>(way.lanes->ranks()) : 1.0;
  trip.ends_for_others = way.keeps_runs();
  trip.gradient = pack_own_on_arrival;
  trip.end = way.keeps_runs() ? decode_run_of_mine : unpack_own;
  trip.recover = recover_run;
  trip.late = late_over(way);
  return trip;
}

Trip by_hook(const Way& way, Travels& travels, Slabs* slabs) {
  for (auto& travel : travels) set_own_wire(travel, {travel.outline.layout.gradient_dtype()}, *way.hook, slabs);
  Trip trip;
  add_stages(trip, {{way.hook}, whole}, {.write = pack_own, .instead = void_hook});
  trip.runs_users_code = true;
  trip.gradient = pack_own_on_arrival;
  trip.end = unpack_result;
  trip.recover = leave;
  trip.late = [hook = way.hook](Bucket& bucket, double) { return hook->start_late(bucket); };
  return trip;
}

// Shows how fast a step would be without communication.
Trip nowhere(Travels& travels) {
  for (auto& travel : travels) travel.outline.do_without_wire(travel.outline.layout.format());
  Trip trip;
  trip.stages.push_back({.write = measure_all});
  trip.gradient = measure_on_arrival;
  trip.end = trip.recover = leave;
  trip.late = [](Bucket&, double) { return [] {}; };
  return trip;
}

}  // namespace

Travel* guest_of(Travels& travels, const std::optional<Shared>& shared, size_t bucket) {
  const auto behind = shared ? shared->second - shared->first : 0;
  if (!shared || bucket < behind) return nullptr;
  auto& guest = travels[bucket - behind];
  const bool fits =
      guest.legs[1].dtype == travels[bucket].legs[0].dtype && guest.bucket->device() == travels[bucket].bucket->device();
  return fits ? &guest : nullptr;
}

Travel* host_of(Travels& travels, const std::optional<Shared>& shared, size_t bucket) {
  const auto host = bucket + (shared ? shared->second - shared->first : 0);
  return shared && host < travels.size() && guest_of(travels, shared, host) != nullptr ? &travels[host] : nullptr;
}

Trip make_trip(const Way& way, std::vector<Bucket>& buckets, Travels& travels, Slabs* slabs) {
  TORCH_CHECK(way.sharding == nullptr || way.sharding->fit(buckets),
              "fastddp: how gradients travel was chosen for other buckets");
  for (auto& bucket : buckets) {
    auto outline = bucket.outline();
    outline.shard = way.keeps_runs() ? way.shards.at(bucket.index()) : nullptr;
    outline.set_grid(way.keeps_runs() ? way.sharding->grid() : Grid());
    auto spans = outline.layout.spans();
    travels.push_back({.bucket = &bucket, .outline = std::move(outline), .spans = std::move(spans)});
  }
  if (way.hook != nullptr) return by_hook(way, travels, slabs);
  if (buckets.empty()) return Trip();
  if (!way.lanes) return nowhere(travels);
  return way.node ? in_two_levels(way, travels, slabs) : in_one_level(way, travels, slabs);
}

}  // namespace fastddp
