// A message: the legs that travel together. Note [Messages], pipeline.cpp.
#pragma once

#include <utility>
#include <vector>

#include "bucket/wire_memory.h"
#include "transport/transport.h"

namespace fastddp {

// Starts in one tick and goes through the transport's rounds, one in each tick.
struct Message {
  // The place of a leg in the wires that the codec writes.
  struct Place {
    size_t leg;
    size_t bucket;
    size_t wire;
    int64_t offset;
    int64_t elements;
    at::Tensor in(const std::vector<at::Tensor>& wires) const { return wires[wire].narrow(0, offset, elements); }
  };
  std::vector<Place> places;
  using Format = std::pair<at::TensorOptions, int64_t>;  // and elements
  std::vector<Format> formats;                           // of the wires
  WireMemory memory;                                     // for the wires and their sums
  bool has_wires = false;                                // they exist: note [Wires of messages], pipeline.cpp
  std::vector<at::Tensor> wires;
  // The sums, for a codec that keeps what it sent; else the transport's room, or empty.
  std::vector<at::Tensor> sums;
  bool is_bucket_wire = false;  // the bucket's own wire travels, and the codec needs none
  std::vector<Piece> pieces;    // kept from window to window, for their room

  // This window's.
  std::vector<size_t> started;  // how many pieces, by round
  bool is_void = false;         // something else travels in place of gradients

  void forget_window() {
    for (auto& piece : pieces) {
      piece.wire.reset();
      piece.works.clear();
      piece.sent = piece.added_up = 0;
    }
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
