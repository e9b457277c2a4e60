#include "watch/node.h"

namespace fastddp {

void Node::look() {
  const std::lock_guard lock(mutex_);
  for (const auto& path : shared_pages()) {
    const auto found = try_to_read_page(path);
    if (!found || found->job != job_ || found->rank == rank_) continue;
    if (life_of(found->process) == Life::gone && mates_.contains(found->rank)) continue;
    mates_[found->rank] = {path, *found, std::nullopt};
  }
}

std::vector<Record> Node::records() {
  const std::lock_guard lock(mutex_);
  std::vector<Record> records;
  for (auto& [rank, mate] : mates_) {
    const auto now = try_to_read_page(mate.path);
    const bool is_the_same = now && now->job == job_ && now->rank == rank;
    if (is_the_same) mate.last = *now;
    const bool goes_on = is_the_same && mate.told && mate.last != *mate.told;
    mate.told = mate.last;
    // A rank without a page has ended: nobody else removes it.
    const auto life = is_the_same ? life_of(mate.last.process) : Life::gone;
    records.push_back(record_of(mate.last, life, goes_on ? 0.0 : mate.last.seconds));
    records.back().is_stale = !is_the_same;
    records.back().other_model = awaited_elsewhere(records.back());
  }
  return records;
}

std::string Node::awaited_elsewhere(const Record& of) const {
  if (of.waits()) return "";
  // Only this process's pages: a machine on which many jobs were killed has thousands of pages, and this is asked often.
  for (const auto& path : shared_pages(of.process.pid)) {
    const auto found = try_to_read_page(path);
    if (!found || found->process.pid != of.process.pid || found->job == job_) continue;
    const auto other = record_of(*found, of.life, found->seconds);
    if (!other.waits()) continue;
    return bucket_in_words(other) + " of another model (number " + std::to_string(found->number + 1) + " of its process)";
  }
  return "";
}

}  // namespace fastddp
