// A backward as autograd's engine runs it: whether it is over, and what it raised.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>

namespace fastddp {

// Note [A backward that raises]
// The engine runs final callbacks only when a backward ends well, and tells nobody when one raises. So nobody is told here
// either: whoever comes next (a forward, an optimizer, a question about the state) asks, and what is to be done is done then.
// Nothing of fastddp's runs between the exception and its caller: no wait for other ranks, no error that hides the first one.
// The answer comes from the future that the engine completes before `backward()` returns or raises: there is no moment in
// which the caller knows of an exception and this object does not.
class Backward {
 public:
  // None.
  Backward() = default;
  // The one that calls this, from a hook.
  static Backward current();

  // Neither ended nor raised.
  bool runs() const;
  bool raised() const;
  // Of one that raised.
  std::string error() const;

 private:
  // What the future's own callback has noted, for when the future is gone. As long as it is there it is asked itself, since
  // callbacks run a moment after the caller has been woken. It is not kept: torch.distributed.autograd demands its future back.
  struct Outcome;
  c10::weak_intrusive_ptr<at::ivalue::Future> future_{c10::intrusive_ptr<at::ivalue::Future>()};
  std::shared_ptr<const Outcome> outcome_;  // null: none
};

}  // namespace fastddp
