// Ranks of one machine read each other's memory, in place of messages.
#pragma once

#include <memory>

#include "transport/lanes.h"
#include "transport/owners.h"

namespace fastddp {

// Note [Reads]
// Between processes of one machine, a message over gloo is copied into the kernel and out of it again, through TCP, and wakes
// a thread on either side. Linux also lets a process read another one's memory, with one copy (process_vm_readv(2), as MPI
// does). So a rank writes into its outbox where a piece is (note [Outboxes], outbox.h). The others look there. They read their
// shards when they wait for them: to their place, or a part at a time, which is added up while it is in cache. Then they write
// into their outboxes that they have read: the memory may change now. Its owner waits for that when it has no further use of a
// piece, not sooner. If a spread follows, nobody waits for acknowledgements: receiving the sum proves that the shards were
// read.
//
// The thread that waits does the work, so all ranks have to wait at the same point of the program. That holds in backward and in a
// step. It does not where some ranks may look at parameters and others not.

// Whether all ranks of the level can read each other.
bool can_read(const Level& level, const Processes& processes);

// Tells the level's ranks about its outbox, by messages over `lane`: all of them call it together.
std::shared_ptr<const Owners> make_reads(Level level, const Processes& processes, c10d::ProcessGroup& lane);

}  // namespace fastddp
