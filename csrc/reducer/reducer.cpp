#include "reducer/reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "errors/see.h"
#include "pipeline/pipeline.h"
#include "reducer/errors.h"

namespace fastddp {
Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Plan& plan,
                 c10::intrusive_ptr<c10d::ProcessGroup> process_group, GradientForm form, Expect expect,
                 std::vector<size_t> sparse)
    : process_group_(std::move(process_group)),
      buckets_(std::move(parameters), names, std::move(sparse), form),
      window_(buckets_.parameters().size(), expect),
      averaged_(window_, mutex_),
      timeline_(buckets_.parameters(), names, *process_group_),
      ticks_(buckets_, timeline_, std::make_shared<Pipeline>(make_cast(std::nullopt), make_all_reduce(Lanes({process_group_}))),
             [this](Bucket& bucket) { averaged_.bucket_finished(bucket); }),
      reduction_(*this, buckets_, window_, ticks_, timeline_, conductor_, shared_sums_, mutex_),
      local_(buckets_, window_),
      closing_(buckets_, window_, *process_group_, shared_sums_),
      hooks_(
          buckets_.parameters(), [this](size_t parameter, bool is_defined) { before_gradient(parameter, is_defined); },
          [this](size_t parameter, const at::Tensor& incoming, bool exclusive) {
            on_gradient(parameter, incoming, exclusive);
          }) {
  own(ticks_.exchange());
  set_plan(plan);
}

Reducer::~Reducer() {
  hooks_.remove();
  interruption_->keep_for_good(process_group_, ticks_.shared_exchange());
  const bool has_begun = window_.is(WindowState::reducing) || window_.is(WindowState::partial);
  if (!has_begun && !window_.is(WindowState::failed)) return;
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  has_streams(buckets_.device()) ? ticks_.leave_behind() : ticks_.exchange().undo({});
}

void Reducer::begin_window() {
  buckets_.reset();
  ticks_.reset();
  local_.reset();
  closing_.reset();
  reduction_.forget_gradients();
  timeline_.happened(What::window);
}

// -------------------------------------------------------------------------------------------------- between two windows

void Reducer::check_between_windows(const char* what) const {
  const bool has_begun =
      window_.is(WindowState::reducing) || window_.is(WindowState::partial) || window_.is(WindowState::failed);
  TORCH_CHECK(!has_begun, "fastddp: ", what, " between two windows only, not while one is ", to_string(window_.state()),
              see("FD014"));
  TORCH_CHECK(!conductor_.is_busy(), "fastddp: ", what, " when no communication hook runs", see("FD014"));
}

void Reducer::set_plan(const Plan& plan) {
  const std::lock_guard lock(mutex_);
  check_between_windows("buckets can be replaced");
  look_for_skipped_step();
  const auto is_never_used = [&](size_t parameter) { return window_.knows_first() && !window_.ever_used(parameter); };
  const auto movable = buckets_.replace(plan, is_never_used);
  window_.set_buckets(plan);
  ticks_.exchange().prepare(buckets_.all(), buckets_.side_streams(), nullptr);
  timeline_.plan(buckets_.all());
  movable_ = movable;
  if (memory_ == nullptr) place_gradients();
}

void Reducer::set_exchange(std::shared_ptr<Exchange> exchange) {
  const std::lock_guard lock(mutex_);
  check_between_windows("how gradients are exchanged can be changed");
  own(*exchange);
  exchange->set_weighting(weighting_);
  const auto memory = memory_;
  std::optional<Slabs> slabs;
  if (memory != nullptr) slabs.emplace(*memory);
  exchange->prepare(buckets_.all(), buckets_.side_streams(), slabs ? &*slabs : nullptr);
  timeline_.plan(buckets_.all());
  if (has_streams(buckets_.device())) {
    auto groups = exchange->groups();
    groups.push_back(process_group_);
    interruption_->may_abort(std::move(groups));
  }
  ticks_.set_exchange(std::move(exchange));
  if (slabs) {
    const Unlocked unlocked(mutex_);  // it may run Python code
    slabs->allocate();
  }
  place_gradients();
}

void Reducer::use_memory(std::shared_ptr<const RegisteredMemory> memory) {
  const std::lock_guard lock(mutex_);
  check_between_windows("where wires come from can be changed");
  memory_ = std::move(memory);
  for (auto& bucket : buckets_.all()) bucket.wire.drop();  // gradients that live there move with the next exchange
}

void Reducer::become_sharded(const Sharding* sharding, const std::vector<std::vector<at::Tensor>>& holders,
                             const std::vector<at::Tensor>& notices) {
  const std::lock_guard lock(mutex_);
  check_between_windows("gradients can be sharded");
  buckets_.become_sharded(sharding, holders, notices);
}

// ----------------------------------------------------------------------------------------------------- before a backward

void Reducer::begin_forward(bool grad_enabled) {
  const std::lock_guard lock(mutex_);
  interruption_->check();
  if (!Backwards::is_inside_one()) {
    if (!grad_enabled && backwards_.last().runs()) return;  // in another thread, which this forward does not affect
    // Only one window can be open, so a forward that may open one waits.
    backwards_.let_last_end(mutex_);
    notice_failure();
    backwards_.forget();
    if (window_.is(WindowState::failed)) repair();
    timeline_.happened(What::forward);
  }
  if (!grad_enabled) return;
  TORCH_CHECK(!window_.is(WindowState::partial), "fastddp: a forward began while gradients of the last window are missing");
  if (!steps_are_seen_ && !window_.is(WindowState::reducing) && !adds_up()) ticks_.exchange().keep();
  apply(WindowEvent::forward);
  timeline_.happened(What::opens);
}

// A forward inside a backward (activation checkpointing) belongs to the window that is reducing, and changes nothing.
void Reducer::arm(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  apply(WindowEvent::arm);
  backwards_.watch(outputs, [reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_begin();
  });
  if (!backwards_.are_seen_early()) reduction_.remember_gradients();
}

// --------------------------------------------------------------------------------------------- from a gradient to its bucket

// A backward is best seen at the outputs of its forward. Its first gradient may come inside a reentrant checkpoint, which runs
// a backward of its own that ends sooner.
void Reducer::on_backward_begin() {
  const std::lock_guard lock(mutex_);
  // A backward for a choice may bring no gradient of ours. If it does, its first gradient begins the reduction.
  if (Backwards::is_for_a_choice()) return backwards_.note_choice();
  note_backward();
  // If every gradient has to come, a backward that brings no gradient of ours is not ours: it trains something upstream.
  if (window_.expects_all()) return;
  const bool begins_another = window_.is(WindowState::finished) && window_.ends_with_backward();
  if (begins_another || window_.is(WindowState::armed) || window_.is(WindowState::partial))
    begin_reduction(/*at_outputs=*/true);
}

// Notes the outermost backward, not those that reentrant checkpoints run inside it.
void Reducer::note_backward() {
  if (backwards_.last().runs()) return;
  if (window_.is(WindowState::reducing) || window_.is(WindowState::partial)) notice_failure();
  backwards_.note([reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_end();
  });
  timeline_.happened(What::backward);
}

// Note [Before the first gradient]
// A window begins before autograd writes its first gradient: placeholders hold what gradients were until then. If the
// window began after that gradient, a placeholder would take it for an older one, and it would be averaged twice.
void Reducer::before_gradient(size_t parameter, bool is_defined) {
  if (shared_sums_.are_there()) {
    const bool by_layer = !is_defined || (buckets_.form().in_main_grad && ask_layer_(parameter));
    const std::lock_guard lock(mutex_);
    shared_sums_.zero(buckets_, parameter, by_layer);
  }
  if (is_unstepped_ && looked_in_.exchange(Backwards::number()) != Backwards::number()) {  // mostly without the lock
    const std::lock_guard lock(mutex_);
    look_for_skipped_step();
  }
  if (window_.may_begin()) begin_with_gradient();
  if (!window_.expects_all()) {
    const std::lock_guard lock(mutex_);
    if (window_.is(WindowState::reducing)) reduction_.look_at(parameter);
  }
  if (!is_defined || !buckets_.are_sharded()) return;
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  buckets_.take_notice(parameter);  // once: a placeholder of the window that begins has taken it
}

void Reducer::begin_with_gradient() {
  const std::lock_guard lock(mutex_);
  if (!window_.may_begin() || !Backwards::is_inside_one()) return;
  // Another backward over the last forward begins at its outputs (on_backward_begin), if they are watched.
  const bool is_another = window_.is(WindowState::finished);
  const bool comes_by_outputs = !backwards_.are_seen_early() || backwards_.is_noted_choice();
  if (is_another && (!window_.ends_with_backward() || !comes_by_outputs)) return;
  const bool was_seen = backwards_.last().runs();
  note_backward();
  TORCH_CHECK(was_seen || !window_.may_end_early() || !Backwards::is_inside_nested(), kBeginsInCheckpoint, see("FD011"));
  begin_reduction();
}

void Reducer::on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  // To ask for each gradient takes Python too long where no layer is expected to answer.
  const bool asks = buckets_.form().in_main_grad || !incoming.defined() || asks_each_layer_;
  const bool by_layer = asks && ask_layer_(parameter);
  const std::lock_guard lock(mutex_);
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  const Range range("gradient", buckets_.name(parameter), buckets_.place(parameter).bucket);
  const c10::AutoGradMode no_grad(false);
  if (buckets_.form().in_main_grad && (incoming.defined() || by_layer)) {
    TORCH_CHECK(by_layer || buckets_.parameters()[parameter].grad().defined(), "fastddp: ", buckets_.describe(parameter),
                kMainGradientIsGone, see("FD008"));
    buckets_.add_to_main(parameter);
    exclusive = false;
  }
  // Somebody called the accumulator by hand: there is no backward whose end could finish a window.
  if (!Backwards::is_inside_one()) return on_local_gradient(parameter, exclusive);
  // The window's backward is over: this gradient is of another one.
  if (window_.is(WindowState::reducing) && !backwards_.last().runs()) notice_failure();
  if (window_.is(WindowState::failed)) return;
  if (!window_.is(WindowState::reducing)) return on_local_gradient(parameter, exclusive);
  if (by_layer) reduction_.note_written(parameter);
  reduction_.on_gradient(parameter, incoming, exclusive);
}

void Reducer::on_local_gradient(size_t parameter, bool exclusive) {
  if (window_.is(WindowState::finished)) {
    TORCH_CHECK(window_.arrival(parameter) != Arrival::local_synchronised, "fastddp: ", buckets_.describe(parameter),
                kGradientAfterItsWindow, see("FD006"));
  }
  TORCH_CHECK(buckets_.has(parameter) || buckets_.is_sparse(parameter), "fastddp: ", buckets_.describe(parameter),
              kUsageChanged, see("FD007"));
  apply(WindowEvent::local_gradient);
  window_.note_local(parameter);
  if (buckets_.form().of_16_bits) buckets_.settle(parameter, exclusive);
  buckets_.mark(parameter);
  // Nobody reports when such a backward begins, so its first gradient counts.
  if (timeline_.doing() == What::backward) return;
  timeline_.happened(What::backward);
  if (!Backwards::is_inside_one()) return;
  Backwards::when_this_one_ends([reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->timeline()->happened(What::after_backward);
  });
}

void Reducer::begin_reduction(bool at_outputs) {
  note_backward();
  if (window_.is(WindowState::failed)) return;
  look_for_skipped_step();
  apply(WindowEvent::reduce);
  timeline_.happened(What::reduces);
  if (closing_.status_rides(ticks_.exchange())) ticks_.wait_before(ticks_.exchange().status_tick());
  if (at_outputs) reduction_.remember_gradients();
  reduction_.begin();
}

// --------------------------------------------------------------------------------------------------- the end of a backward

void Reducer::on_backward_end() {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  const auto ends = c10::make_scope_exit([&] { timeline_.happened(What::after_backward); });
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  if (!window_.is(WindowState::reducing)) return;
  reduction_.take_unseen();
  const Conductor::Turn turn(conductor_, mutex_);
  if (window_.ends_with_backward()) {
    reduction_.complete_all_buckets();
  } else if (!reduction_.missing().empty()) {
    return apply(WindowEvent::lack);
  } else {
    reduction_.synchronise_local_gradients();
  }
  timeline_.happened(What::computed);
  finish_window();
}

void Reducer::finish_window() {
  closing_.check_sparse_gradients();
  local_.measure_beside_buckets();
  closing_.say({.window = window_.ended(),
                .lost_a_backward = backwards_.lost_one(),
                .local = local_.are_watched() ? &local_ : nullptr,
                .scale = loss_scale_});
  const Timeline::Wait waits(timeline_, What::tick, ticks_.next());
  ticks_.tick_to_the_end();
  auto& exchange = ticks_.exchange();
  const bool status_goes_first = exchange.starts_all_in_ticks();
  if (status_goes_first) closing_.send_status(exchange);
  ticks_.finish_all();
  if (!status_goes_first) closing_.send_status(exchange);
  // From here on we work on the caller's streams, which now wait for all gradients.
  ticks_.join_current_streams();
  timeline_.happened(What::closing);
  if (const auto failed = closing_.receive_status(exchange)) {
    failure_.happened_elsewhere(*failed, window_.ended() + 1, process_group_->getRank());
    fail();
    TORCH_CHECK(false, failure_.text(), see("FD010"));
  }
  closing_.exchange_sparse_gradients(exchange);
  closing_.exchange_late_gradients(exchange);
  timeline_.happened(What::closed);
  averaged_.closed(closing_);
  local_.judge(window_.ended(), process_group_->getSize(), closing_, ticks_);
  exchange.let_wires_go();
  apply(WindowEvent::finish);
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) buckets_.mark(parameter);
  is_unstepped_ = !stepped_in_window_;
  asks_each_layer_ = false;
  if (exchange.group() != nullptr) {
    shared_sums_.note(weighting_, exchange.group()->getRank(), window_, buckets_.parameters().size());
  }
  if (std::exchange(stepped_in_window_, false)) exchange.keep();
  timeline_.happened(What::ends);
}

// ------------------------------------------------------------------------------------------------------------ note [Steps]

// Whether gradients of the last window are still in `.grad`, so that the next one adds to them. Main gradients say nothing
// about it: they always stay.
bool Reducer::adds_up() const {
  const auto is_there = [](const at::Tensor& parameter) { return parameter.grad().defined(); };
  return std::ranges::any_of(buckets_.parameters(), is_there);
}

void Reducer::note_optimizer(bool begins) {
  const std::lock_guard lock(mutex_);
  timeline_.happened(begins ? What::optimizer : What::after_optimizer);
  if (begins) return;
  steps_are_seen_ = true;
  is_unstepped_ = false;
  stepped_in_window_ = window_.is(WindowState::reducing) || window_.is(WindowState::partial);
  if (!stepped_in_window_ && !window_.is(WindowState::failed)) ticks_.exchange().keep();
}

void Reducer::discard_step(at::Tensor only_if) {
  const std::lock_guard lock(mutex_);
  notice_failure();
  if (window_.is(WindowState::failed)) return;  // repair() undoes it
  TORCH_CHECK(!window_.is(WindowState::reducing) && !window_.is(WindowState::partial) && !conductor_.is_busy(),
              "fastddp: a step can be discarded after its backward only, not while its gradients travel", see("FD014"));
  if (only_if.defined() && only_if.is_cpu()) {
    if (only_if.item<double>() == 0.0) return;
    only_if.reset();
  }
  is_unstepped_ = false;
  const c10::AutoGradMode no_grad(false);
  ticks_.exchange().undo(only_if);
}

// Before a backward's first gradient, and before buckets lose their marks. Gradients that are still there are added to, and the
// same question comes again.
void Reducer::look_for_skipped_step() {
  const bool is_between = !window_.is(WindowState::reducing) && !window_.is(WindowState::partial);
  if (!is_unstepped_ || !steps_are_seen_ || !is_between || is_capturing(buckets_.device())) return;
  const c10::AutoGradMode no_grad(false);
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (buckets_.still_holds(parameter)) return;
  }
  is_unstepped_ = false;
  if (!window_.is(WindowState::failed)) ticks_.exchange().undo({});
}

std::vector<size_t> Reducer::never_averaged() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> found;
  if (!window_.is(WindowState::accumulating) && !window_.is(WindowState::armed)) return found;
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    const bool is_local = window_.arrival(parameter) == Arrival::local;
    if (is_local && holds_anything(buckets_.gradient(parameter))) found.push_back(parameter);
  }
  return found;
}

std::vector<size_t> Reducer::averaged() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> found;
  if (!window_.is(WindowState::finished)) return found;
  for (size_t parameter = 0; parameter < buckets_.parameters().size(); ++parameter) {
    if (window_.arrival(parameter) != Arrival::none) found.push_back(parameter);
  }
  return found;
}

void Reducer::send_parameters(Gather& gather, size_t bucket, const at::Tensor& memory) {
  const Range range("gather", [&] {
    return " bucket=" + std::to_string(bucket) + " bytes=" + std::to_string(memory.nbytes()) +
           " wire=" + dtype_name(memory.scalar_type());
  });
  gather.start(bucket, memory);
  timeline_.happened(What::sent, bucket);
}

void Reducer::await_parameters(Gather& gather, size_t bucket) {
  const Range range("await", [&] { return " bucket=" + std::to_string(bucket); });
  const Timeline::Wait waits(timeline_, What::gather, bucket);
  try {
    gather.wait(bucket);
  } catch (...) {
    timeline_.progress()->fails_for_others();
    throw;
  }
}

Locked<LocalGradients> Reducer::local_gradients() {
  std::unique_lock lock(mutex_);
  notice_failure();
  local_.notice_late(closing_);
  return {std::move(lock), local_};
}

}  // namespace fastddp
