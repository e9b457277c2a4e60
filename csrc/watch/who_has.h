// Which ranks have the gradients that a window has ended without on this rank.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "watch/board.h"
#include "watch/record.h"

namespace fastddp {

// What a rank has said of its part in a window.
struct Lack {
  std::vector<size_t> parameters;  // whose gradients have not come
  bool waits;                      // in backward: they may still come
  bool operator==(const Lack&) const = default;
};
using Lacks = std::map<int, Lack>;  // by rank

// A rank that has waited for so many seconds in backward says what it lacks, in case others ask.
constexpr double kLongWait = 2.0;

// Note [Who has what]
// Each rank whose backward has ended without some gradients asks. The others are in backward, and wait for it: they have written
// their records, and the pages of this machine tell the same. The first rank to ask reads them until all ranks are known, or its
// patience ends, and writes down one answer. The other ranks that ask wait for this answer. So no rank but the first one reads the
// records of all. While no gradient is missing, nobody asks.
class WhoHas {
 public:
  explicit WhoHas(Board board) : board_(std::move(board)) {}

  // `own`: of this rank. `on_machine`: reads the records of this machine's other ranks. `patience`: in seconds.
  // Returns what the other ranks have said. None: the store does not answer.
  std::optional<Lacks> ask(const Record& own, double patience, const std::function<std::vector<Record>()>& on_machine);

 private:
  Board board_;
  std::string answered_;  // the key of this rank's last answer
};

// Ranks and parameters as text. Equal lacks are written once: "0,2-9:4-5;1+7;", where "+" says that these ranks wait.
std::string encode(const Lacks& lacks);
Lacks decode_lacks(const std::string& text);

}  // namespace fastddp
