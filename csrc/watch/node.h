// The ranks of this machine that train the same model, as their pages show them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "observe/progress.h"
#include "watch/record.h"

namespace fastddp {

// Any thread may use it.
class Node {
 public:
  Node(uint64_t job, int rank) : job_(job), rank_(rank) {}

  // Remembers the ranks that are there: a process that ends removes its page.
  void look();

  // One for each other rank of this machine. A rank that has not changed since the last call has stood still.
  std::vector<Record> records();

  // If the rank does not wait in this model: what its process waits for in another model. Empty: nothing.
  std::string awaited_elsewhere(const Record& of) const;

 private:
  struct Mate {
    std::string path;
    Snapshot last;
    std::optional<Pulse> told;  // as of the last call
  };

  const uint64_t job_;
  const int rank_;
  std::mutex mutex_;
  std::map<int, Mate> mates_;
};

}  // namespace fastddp
