// Ranks of one machine read each other's memory, in place of messages.
#pragma once

#include <memory>

#include "transport/lanes.h"
#include "transport/stages.h"

namespace fastddp {

// Note [Reads]
// Between processes of one machine, a message over gloo is copied into the kernel and out of it again, through TCP. Linux also lets a
// process read another one's memory, with one copy (process_vm_readv(2), as MPI does). So a rank sends a *letter*, which says
// where a shard is, and the receiver reads the shard when it waits for it: to its place, or a part at a time, which it adds up
// while the part is in cache. After that it sends *thanks*: the memory may change now. Owners wait for thanks when they have no
// further use of a piece, not sooner, since other ranks may first need messages of later buckets. Where the same ranks spread what
// comes of a sum there are no thanks for its shards, because a sum that has come says that they were read.
//
// The thread that waits does the work, so all ranks have to wait at the same point of the program, and in the same order. That holds in
// backward and in a step. It does not where some ranks may look at parameters and others not.

// Ubuntu's kernel (Yama, ptrace_scope 1) allows reads only by processes that were named. Names those that have this one's parent, as
// the ranks of a launcher do.
void let_siblings_read();

// Whether `process` has these bytes at `address`. False also where it may not be read.
bool has_bytes(int process, uint64_t address, const std::string& bytes);

// Whether all ranks of the level can read each other.
bool can_read(const Level& level, const Processes& processes);

std::unique_ptr<Stages> make_reads(Level level, Processes processes);

}  // namespace fastddp
