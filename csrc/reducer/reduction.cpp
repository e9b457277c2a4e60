#include "reducer/reduction.h"

#include <c10/core/GradMode.h>

#include "autograd/backward.h"
#include "autograd/grad_hooks.h"
#include "bucket/bucket_range.h"
#include "errors/see.h"
#include "reducer/errors.h"
#include "reducer/reducer.h"

namespace fastddp {

Reduction::Reduction(Reducer& reducer, Buckets& buckets, Window& window, Driver& driver, Timeline& timeline, std::mutex& lock)
    : reducer_(reducer),
      buckets_(buckets),
      window_(window),
      driver_(driver),
      timeline_(timeline),
      lock_(lock),
      shared_sums_(buckets, window),
      layers_(buckets, window),
      others_(reducer, buckets.parameters()) {}

void Reduction::take_unseen() {
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) == Arrival::synchronised || !layers_.look_at(parameter)) continue;
    on_gradient(parameter, {}, held_by_parameter_alone(buckets_.gradient(parameter)));
  }
}

void Reduction::begin(bool goes_on) {
  goes_on_ = goes_on;
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) != Arrival::local || buckets_.still_holds(parameter)) continue;
    window_.forget_local(parameter);  // it was removed
    buckets_.tell(parameter, &Shard::take_notice);
  }
  const bool in_company = shares_order_ || others_.share_group();
  starts_at_end_ = window_.is_learning() || (window_.ends_with_backward() && in_company);
  const bool others_read = !reducer_.hooks_are_alone() && others_.read_gradients();
  TORCH_CHECK(!others_read || !buckets_.form().as_bucket_view, kViewsInTwoWires, see("FD013"));
  TORCH_CHECK(!others_read || !buckets_.form().in_main_grad, kMainGradientsOfTwo, see("FD013"));
  const bool lives_in_wires = buckets_.form().as_bucket_view || buckets_.form().in_main_grad;
  const bool stay = others_read || (Backwards::is_for_a_choice() && !lives_in_wires);
  for (auto& bucket : buckets_.all()) bucket.window.left_in_place = stay;
  if (window_.expects_all()) return;
  // Placeholders may give parameters another gradient.
  layers_.look_at_all();
  if (window_.is_learning()) return layers_.remember();
  const c10::AutoGradMode no_grad(false);
  for (auto& bucket : buckets_.all()) {
    use_placeholders(bucket, [&](size_t member) { return !window_.waits_for(bucket.layout.parameter(member)); }, counts());
  }
  layers_.remember();
  start_complete_buckets();
}

void Reduction::on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  const bool is_gone = incoming.defined() && !buckets_.gradient(parameter).defined();
  TORCH_CHECK(!is_gone, "fastddp: ", buckets_.describe(parameter), kGradientIsGone, see("FD008"));
  // Hooks also run in parts of the graph that the loss does not depend on. They have nothing to accumulate.
  const bool is_gradient = incoming.defined() || layers_.have_written(parameter) || window_.expects_all();
  const auto hook = window_.count_hook(parameter, is_gradient);
  TORCH_CHECK(hook != Window::Hook::too_many, "fastddp: ", buckets_.describe(parameter),
              " got a second gradient in one window on rank ", reducer_.process_group().getRank(), kSecondGradient, left_out(),
              see("FD006"));
  TORCH_CHECK(window_.ends_with_backward() || hook != Window::Hook::unexpected, "fastddp: ", buckets_.describe(parameter),
              kUsageChanged, see("FD007"));
  if (is_gradient) timeline_.gradient(parameter);
  if (!buckets_.has(parameter)) return;
  const auto [index, member] = buckets_.place(parameter);
  auto& bucket = buckets_[index];
  bucket.window.producers.note(bucket.device());
  if (hook == Window::Hook::last) complete(bucket, member, exclusive);
  if (hook != Window::Hook::unexpected) return;
  note_unexpected(bucket, member, layers_.have_written(parameter) ? at::Tensor() : incoming);
}

std::string Reduction::left_out() const {
  const auto parameters = missing();
  if (!goes_on_ || parameters.empty()) return "";
  return " The backward before this one left " + std::to_string(parameters.size()) + " parameters without a gradient, " +
         buckets_.describe(parameters.front()) + " for one, so its window still waits for them: see FD005.";
}

void Reduction::complete(Bucket& bucket, size_t member, bool exclusive) {
  const auto parameter = bucket.layout.parameter(member);
  if (window_.expects_all() || came(window_, buckets_, parameter)) {
    if (bucket.window.left_in_place) leave_wire(bucket, member);
    bucket.arrive(member, exclusive && !bucket.window.left_in_place);
    driver_.gradient(bucket, member);
  } else {
    use_placeholder(bucket, member, counts()(parameter));
  }
  if (window_.count_down(parameter)) {
    const BucketRange moment("ready", bucket);
    timeline_.happened(What::ready, bucket.index());
  }
  start_complete_buckets();
}

void Reduction::start_complete_buckets() {
  if (is_conducted()) return;
  const auto turn = conduct();
  const auto may_tick = [&] { return window_.is(WindowState::reducing) && !starts_at_end_ && !driver_.next_waits(); };
  while (may_tick() && window_.is_complete(driver_.next())) driver_.tick();
}

void Reduction::synchronise_local_gradients() {
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) != Arrival::local || !window_.waits_for(parameter)) continue;
    window_.synchronise_local(parameter);
    if (!buckets_.has(parameter)) continue;
    const auto& [index, member] = buckets_.place(parameter);
    complete(buckets_[index], member, false);
  }
}

void Reduction::complete_all_buckets() {
  for (auto index = driver_.next(); index < buckets_.size(); ++index) {
    auto& bucket = buckets_[index];
    for (size_t member = 0; member < bucket.size(); ++member) {
      if (bucket.window[member].final || !came(window_, buckets_, bucket.layout.parameter(member))) continue;
      bucket.arrive(member, held_by_parameter_alone(bucket.held(member)));
    }
    use_placeholders(bucket, [&](size_t member) { return !bucket.window[member].final; }, counts());
  }
  window_.stop_waiting();
}

}  // namespace fastddp
