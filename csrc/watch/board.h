// What ranks tell each other in the store when a step stands still.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "watch/record.h"
#include "watch/report.h"

namespace fastddp {

// The store itself may be broken: we give up a call to it after a few seconds, and then leave it alone until try_again().
class Board {
 public:
  // `key`: this model's; the same on all ranks.
  Board(c10::intrusive_ptr<c10d::Store> store, std::string key) : store_(std::move(store)), key_(std::move(key)) {}

  // The same with a connection of its own, for another thread.
  Board another() const { return {store_, key_}; }

  bool answers() const { return answers_; }
  void try_again() { answers_ = true; }

  void write(const Record& record);
  // What these ranks have written last.
  std::vector<Record> read(const std::vector<int>& ranks);

  // Whether this rank is the first to ask; none: the store does not answer.
  std::optional<bool> is_first(const std::string& for_what);

  void put(const std::string& what, const std::string& text);
  void remove(const std::string& what);
  // None: nothing is there within `seconds`, or the store does not answer.
  std::optional<std::string> get(const std::string& what, double seconds);

  // `ends`: whether ranks raise.
  void publish(size_t window, const Report& report, bool ends);
  struct Published {
    std::string text, json;  // empty: waiting helps
  };
  // None: nothing is published yet, or the store does not answer.
  std::optional<Published> published(size_t window);

 private:
  // Returns what `function(store)` returns; none: the store does not answer.
  template <typename Function>
  auto ask(double seconds, Function function) -> std::optional<decltype(function(std::declval<c10d::Store&>()))>;

  const c10::intrusive_ptr<c10d::Store> store_;  // shared in this process: others may be waiting for its answers
  c10::intrusive_ptr<c10d::Store> own_store_;    // our own connection, made at the first use
  const std::string key_;
  bool answers_ = true;
};

}  // namespace fastddp
