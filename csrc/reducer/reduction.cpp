#include "reducer/reduction.h"

#include <c10/core/GradMode.h>

#include "autograd/backward.h"
#include "autograd/grad_hooks.h"
#include "bucket/bucket_range.h"
#include "errors/see.h"
#include "reducer/errors.h"
#include "reducer/reducer.h"

namespace fastddp {

bool came(const Window& window, const Buckets& buckets, size_t parameter) {
  return window.arrival(parameter) != Arrival::none && buckets.gradient(parameter).defined();
}

Reduction::Reduction(const Reducer& reducer, Buckets& buckets, Window& window, Ticks& ticks, Timeline& timeline,
                     Conductor& conductor, const SharedSums& shared_sums, std::mutex& lock)
    : reducer_(reducer),
      buckets_(buckets),
      window_(window),
      ticks_(ticks),
      timeline_(timeline),
      conductor_(conductor),
      shared_sums_(shared_sums),
      lock_(lock),
      others_(reducer, buckets.parameters()),
      written_(buckets.parameters().size()) {}

void Reduction::remember_gradients() {
  remembered_.clear();
  if (window_.expects_all()) return;
  for (size_t parameter = 0; parameter < written_.size(); ++parameter) {
    remembered_.emplace_back(buckets_.gradient(parameter));
  }
}

void Reduction::take_unseen() {
  for (size_t parameter = 0; parameter < remembered_.size(); ++parameter) {
    if (window_.arrival(parameter) == Arrival::synchronised) continue;
    look_at(parameter);
    if (written_[parameter]) on_gradient(parameter, {}, held_by_parameter_alone(buckets_.gradient(parameter)));
  }
}

void Reduction::begin() {
  forget_removed();
  // Placeholders may give parameters another gradient.
  for (size_t parameter = 0; parameter < remembered_.size(); ++parameter) look_at(parameter);
  const bool in_company = shares_order_ || others_.share_group();
  starts_at_end_ = window_.is_learning() || (window_.ends_with_backward() && in_company);
  const bool others_read = !reducer_.hooks_are_alone() && others_.read_gradients();
  TORCH_CHECK(!others_read || !buckets_.form().as_bucket_view, kViewsInTwoWires, see("FD013"));
  TORCH_CHECK(!others_read || !buckets_.form().in_main_grad, kMainGradientsOfTwo, see("FD013"));
  const bool lives_in_wires = buckets_.form().as_bucket_view || buckets_.form().in_main_grad;
  const bool stay = others_read || (Backwards::is_for_a_choice() && !lives_in_wires);
  for (auto& bucket : buckets_.all()) bucket.window.left_in_place = stay;
  if (window_.expects_all()) return;
  if (window_.is_learning()) return remember_gradients();
  const c10::AutoGradMode no_grad(false);
  for (auto& bucket : buckets_.all()) {
    bucket.use_placeholders([&](size_t member) { return !window_.waits_for(bucket.layout.parameter(member)); }, counts());
  }
  remember_gradients();
  start_complete_buckets();
}

void Reduction::forget_removed() {
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) != Arrival::local || buckets_.still_holds(parameter)) continue;
    window_.forget_local(parameter);
    buckets_.take_notice(parameter);
  }
}

void Reduction::on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  const auto hook = window_.count_hook(parameter);
  // Hooks also run in parts of the graph that the loss does not depend on. They have nothing to accumulate.
  const bool is_gradient = incoming.defined() || written_[parameter] || window_.expects_all();
  if (is_gradient) {
    check_expected(parameter, hook);
    const bool is_gone = incoming.defined() && !buckets_.gradient(parameter).defined();
    TORCH_CHECK(!is_gone, "fastddp: ", buckets_.describe(parameter), kGradientIsGone, see("FD008"));
    window_.note_synchronised(parameter);
    timeline_.gradient(parameter);
  }
  if (!buckets_.has(parameter)) return;
  const auto [index, member] = buckets_.place(parameter);
  auto& bucket = buckets_[index];
  bucket.window.producers.note(bucket.device());
  if (hook == Window::Hook::last) complete(parameter, exclusive);
  if (hook == Window::Hook::unexpected && is_gradient) {
    bucket.note_unexpected(member, written_[parameter] ? at::Tensor() : incoming);
  }
}

void Reduction::check_expected(size_t parameter, Window::Hook hook) const {
  TORCH_CHECK(hook != Window::Hook::too_many, "fastddp: ", buckets_.describe(parameter),
              " got a second gradient in one window on rank ", reducer_.process_group().getRank(), kSecondGradient,
              see("FD006"));
  TORCH_CHECK(window_.ends_with_backward() || hook != Window::Hook::unexpected, "fastddp: ", buckets_.describe(parameter),
              kUsageChanged, see("FD007"));
}

void Reduction::complete(size_t parameter, bool exclusive) {
  if (!buckets_.has(parameter)) return;
  const auto [index, member] = buckets_.place(parameter);
  auto& bucket = buckets_[index];
  if (window_.expects_all() || came(window_, buckets_, parameter)) {
    if (bucket.window.left_in_place) bucket.leave_wire(member);
    bucket.arrive(member, exclusive && !bucket.window.left_in_place);
    ticks_.exchange().on_gradient(bucket, member);
  } else {
    bucket.use_placeholder(member, counts()(parameter));
  }
  if (window_.count_down(parameter)) {
    const BucketRange moment("ready", bucket);
    timeline_.happened(What::ready, index);
  }
  start_complete_buckets();
}

void Reduction::start_complete_buckets() {
  if (conductor_.is_busy()) return;
  const Conductor::Turn turn(conductor_, lock_);
  const auto may_tick = [&] { return window_.is(WindowState::reducing) && !starts_at_end_ && !ticks_.next_waits(); };
  while (may_tick() && window_.is_complete(ticks_.next())) ticks_.tick();
}

std::vector<size_t> Reduction::missing() const {
  auto missing = window_.not_final();
  std::erase_if(missing, [&](size_t parameter) {
    return window_.arrival(parameter) == Arrival::local && came(window_, buckets_, parameter);
  });
  return missing;
}

void Reduction::synchronise_local_gradients() {
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) != Arrival::local || !window_.waits_for(parameter)) continue;
    window_.synchronise_local(parameter);
    complete(parameter, false);
  }
}

void Reduction::complete_all_buckets() {
  for (auto index = ticks_.next(); index < buckets_.size(); ++index) {
    auto& bucket = buckets_[index];
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (bucket.window[member].final || !came(window_, buckets_, bucket.layout.parameter(member))) continue;
      bucket.arrive(member, held_by_parameter_alone(bucket.held(member)));
    }
    bucket.use_placeholders([&](size_t member) { return !bucket.window[member].final; }, counts());
  }
  window_.stop_waiting();
}

}  // namespace fastddp
