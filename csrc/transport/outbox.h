// What a rank says of its pieces in its own memory, where ranks of the same machine look: note [Reads], reads.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace fastddp {

// Note [Outboxes]
// Meetings are numbered, and the ranks that share outboxes have the same ones, in the same order. In its entry of a meeting a rank says
// where others find its memory, and later that it has read theirs. An entry is used again kEntries meetings later. Long before
// that all ranks have been through the meeting, because they go through a window or a step together; a rank that finds a later
// meeting in its place raises. Outboxes are never freed, since another rank may look a little later than its owner has a use for it.
struct OutboxEntry {
  std::atomic<uint64_t> begun;  // the meeting's number + 1
  std::atomic<uint64_t> address;
  std::atomic<uint64_t> tag;    // of the piece and the round
  std::atomic<uint64_t> ended;  // the meeting's number + 1
};

class Outbox {
 public:
  static constexpr uint64_t kEntries = 1 << 15;

  // Memory that is not written takes no room.
  Outbox() : entries_(static_cast<OutboxEntry*>(std::calloc(kEntries, sizeof(OutboxEntry)))) {}

  uint64_t address() const { return reinterpret_cast<uint64_t>(entries_); }
  void begin(uint64_t meeting, uint64_t tag, uint64_t address) const;
  void end(uint64_t meeting) const { entries_[meeting % kEntries].ended.store(meeting + 1, std::memory_order_release); }

 private:
  OutboxEntry* entries_;
};

// Memory of another rank's process. DistBackendError: it cannot be read, or says what does not belong here.
struct RemoteRank {
  int process;      // errors name it: ranks have other numbers in other groups
  uint64_t outbox;  // its address there

  void read(uint64_t address, void* target, size_t bytes) const;
  bool has_begun(uint64_t meeting) const;
  // True also if its process is gone, which needs nothing any more.
  bool has_ended(uint64_t meeting) const;
  // Of a meeting that it has begun.
  uint64_t address(uint64_t meeting, uint64_t tag) const;

 private:
  uint64_t number(uint64_t meeting, size_t offset) const;
};

// Whether `process` has these bytes at `address`. False also where it may not be read.
bool has_bytes(int process, uint64_t address, const std::string& bytes);

// Ubuntu's kernel (Yama, ptrace_scope 1) allows reads only by processes that were named. Names those that have this one's parent, as
// the ranks of a launcher do.
void let_siblings_read();

}  // namespace fastddp
