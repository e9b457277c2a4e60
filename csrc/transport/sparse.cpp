#include "transport/sparse.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "transport/works.h"

namespace fastddp {
namespace {

constexpr int64_t kNotANumber = -1;

// A gradient's rows. There is one dimension of indices, because gradients of embeddings have only one.
struct Rows {
  at::Tensor indices;  // [rows]
  at::Tensor values;   // [rows, ...]
};

std::vector<at::Tensor> gather(c10d::ProcessGroup& group, const at::Tensor& mine) {
  std::vector<at::Tensor> everyones;
  for (int rank = 0; rank < group.getSize(); ++rank) everyones.push_back(at::empty_like(mine));
  std::vector<std::vector<at::Tensor>> outputs{everyones};
  std::vector<at::Tensor> inputs{mine};
  const WithoutPythonObjects without;
  Interruption::wait(*group.allgather(outputs, inputs));
  return outputs.front();
}

Rows no_rows(const at::Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  shape.front() = 0;
  return {at::empty({0}, parameter.options().dtype(at::kLong)), at::empty(shape, parameter.options())};
}

at::Tensor gradient_of(const Rows& rows, const at::Tensor& parameter) {
  return at::sparse_coo_tensor(rows.indices.unsqueeze(0), rows.values, parameter.sizes()).coalesce();
}

Rows rows_of(const at::Tensor& gradient, const at::Tensor& parameter, double scale) {
  if (!gradient.defined()) return no_rows(parameter);
  const auto coalesced = gradient.coalesce();
  return {coalesced.indices().select(0, 0), coalesced.values() * scale};
}

at::Tensor padded(const at::Tensor& rows, int64_t count) {
  auto shape = rows.sizes().vec();
  shape.front() = count - rows.size(0);
  return at::cat({rows, at::zeros(shape, rows.options())}).contiguous();
}

at::Tensor joined(const std::vector<at::Tensor>& everyones, const std::vector<int64_t>& counts) {
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < everyones.size(); ++rank) {
    parts.push_back(everyones[rank].narrow(0, 0, std::max<int64_t>(counts[rank], 0)));
  }
  return at::cat(parts);
}

}  // namespace

at::Tensor gradient_without_rows(const at::Tensor& parameter) {
  return gradient_of(no_rows(parameter), parameter);
}

void sum_sparse_gradients(c10d::ProcessGroup& group, std::vector<at::Tensor>& gradients,
                          const std::vector<at::Tensor>& parameters, double scale, bool is_void) {
  if (parameters.empty()) return;
  std::vector<Rows> mine;
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < parameters.size(); ++i) {
    mine.push_back(rows_of(gradients[i], parameters[i], scale));
    numbers.push_back(is_void && !gradients[i].defined() ? kNotANumber : mine.back().indices.size(0));
  }
  const auto sent = at::tensor(numbers, at::kLong).to(parameters.front().device());
  const auto everyones = at::stack(gather(group, sent)).t().contiguous().cpu();  // [parameters, ranks]
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* const first = everyones.const_data_ptr<int64_t>() + i * group.getSize();
    const std::vector<int64_t> counts(first, first + group.getSize());
    const auto most = std::ranges::max(counts);
    if (most > 0) {
      const Rows everyones_rows{joined(gather(group, padded(mine[i].indices, most)), counts),
                                joined(gather(group, padded(mine[i].values, most)), counts)};
      gradients[i] = gradient_of(everyones_rows, parameters[i]);
    }
    const bool is_void_somewhere = std::ranges::min(counts) == kNotANumber;
    if (is_void_somewhere && gradients[i].defined()) gradients[i].values().fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace fastddp
