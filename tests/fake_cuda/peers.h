// How ranks agree on when to run a collective of the simulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <deque>

#include "simulator.h"

namespace fake_cuda {

// The other ranks of a collective. On a GPU it runs as soon as all ranks have reached it, whatever the hosts do. Here work
// runs only when the host waits, and a rank whose host waits for a collective needs the others to run theirs, whatever
// their hosts do. So it leaves a note in the store, and a thread of each rank that has collectives pending looks for such
// notes. Whoever waits does not run collectives: another rank may reach its own only after it got something else from
// this one.
class Peers : public std::enable_shared_from_this<Peers> {
 public:
  // Over a connection of its own: a thread that waits in the store blocks the connection.
  explicit Peers(const c10::intrusive_ptr<c10d::Store>& store) : store_(store->clone()) {}

  void start();
  // The group goes away: collectives that did not run never will.
  void stop();
  bool stopped() const { return stopped_; }

  void announce(const OpPtr& collective);  // it has been enqueued; called with the simulator locked
  void call(const OpPtr& collective);      // this rank waits for it

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
