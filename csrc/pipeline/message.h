// What travels together: note [Messages], pipeline.cpp.
#pragma once

#include <utility>
#include <vector>

#include "bucket/wire_memory.h"
#include "transport/transport.h"

namespace fastddp {

// What is started in one tick and goes through the transport's rounds, one a tick.
struct Message {
  // Where a leg is, in wires that are made for the codec.
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
  WireMemory memory;                                     // where they and their sums come from
  bool has_wires = false;                                // they are there: note [Wires of messages]
  std::vector<at::Tensor> wires;
  // Beside what travels: where a codec that keeps what it has sent finds the sums, or a transport's room; or empty.
  std::vector<at::Tensor> sums;
  bool is_bucket_wire = false;  // the bucket's own wire travels, and the codec has none
  std::vector<Piece> pieces;    // they are kept for their room

  // Of this window.
  std::vector<size_t> started;  // pieces, by round
  bool is_void = false;         // something travels in place of gradients

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
