// What is said at the end of a process.
#pragma once

namespace fastddp {

class StallWatch;

// Note [Last words]
// gloo calls std::terminate, on a thread of its own, when a message is larger than the room for it. It says how many bytes
// came, and not why: ranks have called different collectives. Which rank's process ends so is an accident. So before it
// does, a watch of this process looks where the ranks of its machine are, and says who does something else.
void speaks_last(StallWatch& watch);
void speaks_no_more(StallWatch& watch);

}  // namespace fastddp
