#include "transport/outbox.h"

#include <c10/util/Exception.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "errors/see.h"

namespace fastddp {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

ssize_t try_to_read(int process, uint64_t address, void* target, size_t bytes) {
  const iovec here{target, bytes}, there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(process, &here, 1, &there, 1, 0);
}

}  // namespace

void Outbox::begin(uint64_t meeting, uint64_t tag, uint64_t address) const {
  auto& entry = entries_[meeting % kEntries];
  entry.address.store(address, std::memory_order_relaxed);
  entry.tag.store(tag, std::memory_order_relaxed);
  entry.begun.store(meeting + 1, std::memory_order_release);
}

void RemoteRank::read(uint64_t address, void* target, size_t bytes) const {
  auto* to = static_cast<char*>(target);
  while (bytes > 0) {
    const auto count = try_to_read(process, address, to, bytes);
    TORCH_CHECK_WITH(DistBackendError, count > 0, "fastddp: this rank could read the memory of process ", process,
                     " when training began, and now it cannot: ", count < 0 ? std::strerror(errno) : "nothing came",
                     ". The process may have ended.", see("FD015"));
    address += static_cast<uint64_t>(count);
    to += count;
    bytes -= static_cast<size_t>(count);
  }
}

uint64_t RemoteRank::number(uint64_t meeting, size_t offset) const {
  uint64_t number = 0;
  read(outbox + meeting % Outbox::kEntries * sizeof(OutboxEntry) + offset, &number, sizeof number);
  std::atomic_thread_fence(std::memory_order_acquire);
  return number;
}

bool RemoteRank::has_begun(uint64_t meeting) const {
  const auto begun = number(meeting, offsetof(OutboxEntry, begun));
  TORCH_CHECK_WITH(DistBackendError, begun <= meeting + 1, "fastddp: process ", process, " is ", begun - 1 - meeting,
                   " pieces of gradients or parameters ahead of this rank.");
  return begun == meeting + 1;
}

bool RemoteRank::has_ended(uint64_t meeting) const {
  uint64_t ended = 0;
  const auto place = outbox + meeting % Outbox::kEntries * sizeof(OutboxEntry) + offsetof(OutboxEntry, ended);
  return try_to_read(process, place, &ended, sizeof ended) < 0 || ended > meeting;
}

uint64_t RemoteRank::address(uint64_t meeting, uint64_t tag) const {
  const auto theirs = number(meeting, offsetof(OutboxEntry, tag));
  TORCH_CHECK_WITH(DistBackendError, theirs == tag, "fastddp: process ", process, " sends piece ", theirs,
                   " where this rank sends piece ", tag, ": ranks exchange gradients in different orders.");
  return number(meeting, offsetof(OutboxEntry, address));
}

bool has_bytes(int process, uint64_t address, const std::string& bytes) {
  std::string found(bytes.size(), '\0');
  const auto count = try_to_read(process, address, found.data(), found.size());
  return count == static_cast<ssize_t>(bytes.size()) && found == bytes;
}

void let_siblings_read() {
  prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);  // fails without Yama, where it is not needed
}

}  // namespace fastddp
