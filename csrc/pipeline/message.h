// A message: the legs that travel together. Note [Messages], pipeline.h.
#pragma once

#include <utility>
#include <vector>

#include "bucket/wire_memory.h"
#include "codec/codec.h"
#include "transport/transport.h"

namespace fastddp {

// Starts in one tick and goes through the transport's rounds, one in each tick.
struct Message {
  Message(size_t tick, const Transport& transport) : tick(tick), transport(&transport), started(transport.rounds()) {}

  size_t tick;
  const Transport* transport;
  struct Leg {
    size_t number;
    Bucket* bucket;
  };
  std::vector<Leg> legs;  // the earliest leg first, so the greatest bucket too
  // A bucket's own wire travels: that of its carrier. It has one leg.
  bool is_own_wire = false;
  // The place of a leg in the wires that the codec writes.
  struct Place {
    Leg leg;
    size_t wire;
    int64_t offset;
    int64_t elements;
    at::Tensor in(const std::vector<at::Tensor>& wires) const { return wires[wire].narrow(0, offset, elements); }
  };
  std::vector<Place> places;
  using Format = std::pair<at::TensorOptions, int64_t>;  // and elements
  std::vector<Format> formats;                           // of the wires
  WireMemory memory;                                     // for the wires and their sums
  bool has_wires = false;                                // they exist: note [Wires of messages], pipeline.h
  std::vector<at::Tensor> wires;
  // The sums, for a codec that keeps what it sent; else the transport's room, or empty.
  std::vector<at::Tensor> sums;
  std::vector<Piece> pieces;  // kept from window to window, for their room

  // This window's.
  at::Tensor own_wire;          // or what travels in its place
  std::vector<size_t> started;  // how many pieces, by round
  bool is_void = false;         // something else travels in place of gradients

  // The bucket after which nobody uses the message.
  Bucket& last_bucket() const { return *legs.front().bucket; }

  Works works() const {
    Works all;
    for (const auto& piece : pieces) all.insert(all.end(), piece.works.begin(), piece.works.end());
    return all;
  }

  void forget_window() {
    for (auto& piece : pieces) {
      piece.wire.reset();
      piece.shards.clear();
      piece.works.clear();
      piece.sent = piece.added_up = 0;
    }
    own_wire.reset();
    started.assign(started.size(), 0);
    is_void = false;
  }

  void let_wires_go() {
    has_wires = false;
    wires.clear();
    sums.clear();
    pieces.clear();
  }
};

}  // namespace fastddp
