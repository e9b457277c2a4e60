// What reducers of one process have in common: parameters (nested wrappers, models with a layer in common), process groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastddp {

class Reducer;

// Note [Shared parameters]
// The hooks of all reducers that hold a parameter run one behind the other when its gradient has come, and each reducer
// averages that gradient. So as long as one of the others may still read it, a reducer leaves it as it is: it packs a copy at
// once and writes the average when backward has ended.
// Note [Order among collectives]
// All ranks have to start the collectives of a process group in one order. That of a reducer's buckets is the plan's. Where a
// backward has other collectives too, of a second reducer or of SyncBatchNorm, their place among the buckets depends on when
// buckets are complete, and that differs between ranks if these differ in what they used before (note [Expected gradients],
// window.h). Then buckets start when backward has ended.

// Knows all reducers of the process for as long as it lives.
class OtherReducers {
 public:
  OtherReducers(const Reducer& own, const std::vector<at::Tensor>& parameters);
  ~OtherReducers();
  OtherReducers(const OtherReducers&) = delete;
  OtherReducers& operator=(const OtherReducers&) = delete;

  // Whether one of them reacts to the gradient of one of these parameters now, too.
  bool read_gradients() const;
  // Whether one of them may start collectives of the same process group now.
  bool share_group() const;

 private:
  const Reducer& own_;
  const std::vector<at::Tensor>& parameters_;
};

}  // namespace fastddp
