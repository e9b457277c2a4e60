// What a process says before it ends.
#pragma once

namespace fastddp {

class StallWatch;

// Note [Last words]
// When a message is larger than the room for it, gloo calls std::terminate on a thread of its own. It says how many bytes
// came, but not the reason: ranks have called different collectives. Which rank's process ends this way is chance. So before
// it ends, a watch of this process looks where the ranks of its machine are, and says which rank does something else.
void speaks_last(StallWatch& watch);
void speaks_no_more(StallWatch& watch);

}  // namespace fastddp
