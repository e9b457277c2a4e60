// The ranks of this machine that train the same model, as their pages show them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "observe/progress.h"
#include "watch/record.h"

namespace fastddp {

// By any thread.
class Node {
 public:
  Node(uint64_t job, int rank) : job_(job), rank_(rank) {}

  // Remembers who is there: a process that ends takes its page along.
  void look();

  // Of the other ranks of this machine. What has not changed since the last call has stood still.
  std::vector<Record> records();

  // What the process of a rank that does not wait in this model waits for in another one; empty: nothing.
  std::string awaited_elsewhere(const Record& of) const;

 private:
  struct Mate {
    std::string path;
    Snapshot last;
    std::string told;  // what of it changes as long as it goes on
  };

  const uint64_t job_;
  const int rank_;
  std::mutex mutex_;
  std::map<int, Mate> mates_;
};

}  // namespace fastddp
