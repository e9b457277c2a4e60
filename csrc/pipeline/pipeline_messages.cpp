// The messages of a pipeline: what is decided when buckets are new, and their wires.
#include <algorithm>
#include <utility>

#include "device/huge_pages.h"
#include "pipeline/pipeline.h"
#include "pipeline/reserve_wire.h"

namespace fastddp {
namespace {

int64_t padded(const Message& message, int64_t elements) {
  const auto unit = message.transport->unit();
  return (elements + unit - 1) / unit * unit;
}

int64_t bytes_of(const Message& message, const Message::Format& format) {
  return Slabs::bytes(padded(message, format.second), format.first.dtype().toScalarType());
}

// Sums of ones are exact up to this number.
int64_t counts_up_to(c10::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) return 0;
  return dtype == at::kBFloat16 ? 256 : 2048;
}

// A new place in the message's wire of this dtype.
Message::Place place_in(Message& message, Message::Leg leg, Codec::Format format) {
  const auto options = at::TensorOptions().dtype(format.dtype).device(leg.bucket->device());
  const auto same = [&](const auto& wire) {
    return wire.first.dtype() == options.dtype() && wire.first.device() == options.device();
  };
  auto& wires = message.formats;
  const auto found = std::ranges::find_if(wires, same);
  const auto wire = static_cast<size_t>(found - wires.begin());
  if (found == wires.end()) wires.push_back({options, 0});
  const Message::Place place{leg, wire, wires[wire].second, format.elements};
  wires[wire].second += format.elements;
  return place;
}

}  // namespace

void Pipeline::prepare(std::vector<Bucket>& buckets, const SideStreams& side_streams, Slabs* slabs) {
  fits_ = codec_->fits(buckets);
  if (!fits_) return;  // another exchange is made for these buckets
  side_streams_ = &side_streams;
  buckets_.clear();
  for (auto& bucket : buckets) buckets_.push_back(&bucket);
  std::vector<int64_t> units;
  for (const auto& transport : transports_) units.push_back(transport->unit());
  codec_->prepare(buckets_, units);
  for (auto& stretch : stretches_) {
    const auto ticks = buckets.empty() ? 0 : buckets.size() + delays_[stretch.end - 1];
    stretch.messages.clear();
    for (size_t tick = 0; tick < ticks; ++tick) stretch.messages.push_back(lay_out(stretch, tick));
  }
  with_status_ = nullptr;
  status_place_.reset();
  status_.reset();
  if (!buckets.empty() && has_room_for_status(buckets.back())) make_room_for_status(buckets.back());
  const bool has_tail = with_status_ != nullptr && !status_place_;
  for (auto& bucket : buckets) bucket.set_wire_tail(has_tail && &bucket == &buckets.back() ? kStatusRoom : 0);
  for (auto& message : stretches_.front().messages) reserve(message, slabs);
  is_captured_ = in_window_ = was_drained_ = false;
}

Message Pipeline::lay_out(const Stretch& stretch, size_t tick) const {
  Message message(tick, *transports_[stretch.first]);
  for (auto leg = stretch.first; leg < stretch.end; ++leg) {
    const auto delay = delays_[leg];
    if (tick >= delay && tick - delay < buckets_.size()) add_leg(message, {leg, buckets_[tick - delay]});
  }
  return message;
}

void Pipeline::add_leg(Message& message, Message::Leg leg) const {
  message.legs.push_back(leg);
  const auto format = codec_->format(leg.number, *leg.bucket);
  message.is_own_wire = !format;
  if (!format) return;
  message.places.push_back(place_in(message, leg, *format));
}

// ------------------------------------------------------------------------------ note [Room for the status], exchange.h

// There is, if one collective over all ranks adds up the last bucket's last message, in a dtype that can count them. A transport of
// several rounds may fail in the second one: then ranks that have the others' shards would go on. On a device with streams a
// status of its own costs the host nothing.
bool Pipeline::has_room_for_status(Bucket& last) const {
  const auto& transport = *transports_.back();
  if (stretches_.size() > 1 || transport.rounds() > 1 || !transport.gives_the_sum_to_all()) return false;
  const auto ranks = transport.lanes().ranks();
  return ranks > 1 && ranks <= counts_up_to(dtype_of(codec_->legs() - 1, last)) && !has_streams(last.device());
}

void Pipeline::make_room_for_status(Bucket& last) {
  with_status_ = &message_of(last, codec_->legs() - 1);
  if (with_status_->is_own_wire) return;
  status_place_ = place_in(*with_status_, with_status_->legs.front(), {dtype_of(codec_->legs() - 1, last), kStatusRoom});
}

// -------------------------------------------------------------------------------------------- note [Wires of messages]

// Reserves places in the slab of the lane that carries the message's first piece.
void Pipeline::reserve(Message& message, Slabs* slabs) {
  if (message.legs.empty()) return;
  auto& bucket = message.last_bucket();
  auto& lane = message.transport->lanes().of(message.tick, 0);
  if (message.is_own_wire) {
    const bool may_be_symmetric = stretches_.size() == 1;  // in two levels, gradients live in the wire
    is_symmetric_ = may_be_symmetric && slabs != nullptr && slabs->are_symmetric() && lane.getSize() > 1;
    if (is_symmetric_) bucket.wire.set_home(false);
    reserve_wire(bucket, lane, slabs, may_be_symmetric);
  }
  if (slabs == nullptr || bucket.layout.form().lazy_bucket_allocation) return;
  int64_t bytes = 0;
  for (const auto& format : beside(message, /*gives_room=*/true)) bytes += bytes_of(message, format);
  for (const auto& format : message.formats) bytes += bytes_of(message, format);
  message.memory = slabs->reserve(lane, bucket.device(), bytes);
}

// The formats of `Message::sums`.
std::vector<Message::Format> Pipeline::beside(const Message& message, bool gives_room) const {
  if (codec_->keeps_what_it_sent()) return message.formats;
  if (!gives_room || !message.transport->takes_room()) return {};
  if (!message.is_own_wire) return message.formats;
  const auto& layout = message.last_bucket().layout;
  return {{layout.wire_options(), layout.wire_length()}};
}

void Pipeline::need_wires(Stretch& stretch, size_t tick) {
  if (tick < stretch.messages.size()) need_wires(stretch.messages[tick]);
}

// Makes the message's wires, before their first use in a window.
void Pipeline::need_wires(Message& message) {
  if (std::exchange(message.has_wires, true) || message.legs.empty()) return;
  const auto zeros = [&](const Message::Format& format) {
    const auto& options = format.first;
    const auto elements = padded(message, format.second);
    return (message.memory ? message.memory(elements, options) : empty_in_huge_pages(elements, options)).zero_();
  };
  for (const auto& format : message.formats) message.wires.push_back(zeros(format));
  for (const auto& format : beside(message, message.memory != nullptr)) message.sums.push_back(zeros(format));
  const auto& sums = codec_->keeps_what_it_sent() ? message.sums : message.wires;
  for (const auto& place : message.places) {
    auto& [leg, bucket] = place.leg;
    codec_->place(leg, *bucket, place.in(message.wires), place.in(sums));
    bucket->window.producers.note(bucket->device());
  }
}

}  // namespace fastddp
