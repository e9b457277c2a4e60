// What the reducers of a process share: parameters (nested wrappers, models with a common layer) and process groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastddp {

class Reducer;

// Note [Shared parameters]
// When the gradient of a shared parameter has come, the hooks of all its reducers run one after the other, and each reducer
// averages that gradient. While another reducer may still read it, a reducer leaves the gradient as it is: it packs a copy at
// once, and writes the average when backward has ended.
// Note [Order among collectives]
// All ranks have to start the collectives of a process group in the same order. A reducer's buckets start in the plan's order.
// A second reducer or SyncBatchNorm has other collectives in the same backward, and their place among the buckets depends on
// when buckets are complete. If ranks have used different parameters before, they wait for different gradients (note [Expected
// gradients], window.h), so that place would differ. Then buckets start when backward has ended.

// Registers a reducer for as long as it lives, and looks at the other reducers of the process.
class OtherReducers {
 public:
  OtherReducers(Reducer& own, const std::vector<at::Tensor>& parameters);
  ~OtherReducers();
  C10_DISABLE_COPY_AND_ASSIGN(OtherReducers);

  // The only reducer that has this parameter, and the parameter's number there; null: none, or several. `identity`: the address of
  // the parameter's TensorImpl, which need not live.
  static std::pair<std::shared_ptr<Reducer>, size_t> only_reducer_of(int64_t identity);

  // A backward from `roots` has raised: tells those whose gradients it was to bring. Where there is no graph that is not known, and
  // it tells those that wait for a backward.
  static void backward_raised(const std::vector<at::Tensor>& roots);

  // Whether another reducer now reacts to gradients of these parameters, too, or one that is not fastddp's may: it has a hook.
  bool read_gradients() const;
  // Whether another reducer may now start collectives of the same process group.
  bool share_group() const;

 private:
  Reducer& own_;
  const std::vector<at::Tensor>& parameters_;
  std::unordered_map<const at::TensorImpl*, size_t> numbers_;  // of the parameters
};

}  // namespace fastddp
