#include "bucket/layout.h"

namespace fastddp {

Layout::Layout(size_t index, size_t count, const std::vector<size_t>& numbers, const std::vector<at::Tensor>& parameters,
               const std::vector<std::string>& names, GradientForm form)
    : count_(count),
      form_(form),
      spans_{.bucket = index,
             .dtype = c10::toRealValueType(form.dtype_of(parameters[numbers.front()])),
             .device = parameters[numbers.front()].device()},
      format_{spans_.dtype} {
  for (const auto parameter : numbers) {
    spans_.all.push_back({size(), parameter, 0, parameters[parameter].numel(), 0, parameters[parameter]});
    names_.push_back(names[parameter]);
  }
  spans_.place(format_.apart, format_.unit, format_.tail);
}

bool Layout::set_format(WireFormat format) {
  if (format_ == format) return false;
  format_ = format;
  spans_.place(format_.apart, format_.unit, format_.tail);
  return true;
}

bool Layout::set_grid(Grid grid) {
  if (spans_.grid == grid) return false;
  spans_.grid = grid;
  spans_.place(format_.apart, format_.unit, format_.tail);
  return true;
}

void Layout::zero_gaps(const at::Tensor& wire) const {
  for (const auto& member : spans_.all) {
    const auto end = member.offset + member.length();
    const auto next = member.number + 1 == size() ? wire.numel() : spans_.all[member.number + 1].offset;
    if (next > end) wire.narrow(0, end, next - end).zero_();
  }
}

at::Tensor Layout::view(const at::Tensor& wire, size_t member) const {
  return view_of(wire, spans_.all[member].like, static_cast<size_t>(spans_.all[member].offset));
}

}  // namespace fastddp
