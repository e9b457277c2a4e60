#include "bucket/layout.h"

namespace fastddp {

Layout::Layout(size_t index, size_t count, std::vector<Member> members, GradientForm form)
    : index_(index), count_(count), members_(std::move(members)), form_(form), format_{gradient_dtype()} {
  for (const auto& [parameter, like, name] : members_) lengths_.push_back(like.numel() * (like.is_complex() ? 2 : 1));
  offsets_.resize(lengths_.size());
  place_members();
}

bool Layout::set_format(WireFormat format) {
  if (format_ == format) return false;
  format_ = format;
  place_members();
  return true;
}

bool Layout::set_grid(Grid grid) {
  if (grid_ == grid) return false;
  grid_ = grid;
  place_members();
  return true;
}

// Note [Aligned members]
void Layout::place_members() {
  const auto unit = std::lcm(format_.apart, grid_.member);
  int64_t next = 0;
  for (size_t member = 0; member < size(); ++member) {
    offsets_[member] = static_cast<size_t>(next);
    next = rounded_up(next + length(member), unit);
  }
}

void Layout::zero_gaps(const at::Tensor& wire) const {
  for (size_t member = 0; member < size(); ++member) {
    const auto end = offset(member) + length(member);
    const auto next = member + 1 == size() ? wire.numel() : offset(member + 1);
    if (next > end) wire.narrow(0, end, next - end).zero_();
  }
}

at::Tensor Layout::view(const at::Tensor& wire, size_t member) const {
  return view_of(wire, members_[member].like, offsets_[member]);
}

std::vector<Member> whole_members(const std::vector<size_t>& numbers, const std::vector<at::Tensor>& parameters,
                                  const std::vector<std::string>& names) {
  std::vector<Member> members;
  for (const auto number : numbers) {
    members.push_back({number, parameters[number], names[number]});
  }
  return members;
}

}  // namespace fastddp
