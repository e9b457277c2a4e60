// How ranks agree on when to run a collective of the simulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>

#include "simulator.h"

namespace fake_cuda {

// On a GPU a collective runs as soon as all ranks have reached it, whatever the hosts do. Here work runs only when the host
// waits, and a rank whose host waits for a collective needs the others to run theirs, whatever their hosts do. So it
// leaves a note in the store, and a thread of each rank that has collectives pending looks for such notes.
class PeersOverStore : public Peers, public std::enable_shared_from_this<PeersOverStore> {
 public:
  // Over a connection of its own: a thread that waits in the store blocks the connection.
  explicit PeersOverStore(const c10::intrusive_ptr<c10d::Store>& store) : store_(store->clone()) {}

  void start();
  // The group goes away: collectives that did not run never will.
  void stop();
  bool stopped() const { return stopped_; }

  void announce(const OpPtr& collective) override;
  void call(const OpPtr& collective) override;

 private:
  void run();
  bool is_called(uint64_t number);

  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OpPtr> pending_;
  uint64_t first_ = 0;   // number of pending_.front() in the order of this group
  uint64_t called_ = 0;  // by this rank: all collectives up to here, exclusive
  std::atomic<bool> stopped_{false};
};

}  // namespace fake_cuda
