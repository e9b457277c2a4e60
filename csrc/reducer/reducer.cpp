#include "reducer/reducer.h"

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <optional>
#include <utility>

namespace fastddp {
namespace {

// How many collectives the group has begun, where its backend counts them.
std::optional<uint64_t> sequence_of(c10d::ProcessGroup* group) {
  using Type = c10d::ProcessGroup::BackendType;
  if (group == nullptr) return std::nullopt;
  const auto type = group->getBackendType();
  if (type != Type::GLOO && type != Type::NCCL) return std::nullopt;
  return group->getSequenceNumberForGroup();
}

std::shared_ptr<Way> plain_way(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<Way>(Way{.all = group, .codec = make_cast(std::nullopt), .lanes = Lanes({group})});
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Plan& plan,
                 c10::intrusive_ptr<c10d::ProcessGroup> process_group, GradientForm form, Expect expect,
                 std::vector<size_t> sparse, const std::vector<int64_t>& learned)
    : process_group_(std::move(process_group)),
      buckets_(std::move(parameters), names, std::move(sparse), form),
      window_(buckets_.parameters().size(), expect),
      averaged_(buckets_, window_, mutex_),
      timeline_(buckets_.parameters(), names, process_group_->getRank(), process_group_->getSize()),
      driver_(buckets_, timeline_, mutex_, [this](Bucket& bucket) { averaged_.bucket_finished(bucket); }),
      steps_(buckets_, window_, driver_),
      reduction_(*this, buckets_, window_, driver_, timeline_, mutex_),
      local_(buckets_, window_),
      closing_(buckets_, window_, *process_group_, reduction_.shared_sums()),
      were_handed_over_(buckets_.parameters().size()),
      hooks_(buckets_.parameters()) {
  driver_.status_is_written_by([this](const at::Tensor& room) { closing_.write_status(driver_, room); });
  if (!learned.empty()) window_.go_on_from(learned);
  set_way(plain_way(process_group_), plan);
  buckets_.place_gradients();  // main gradients have to be there
  timeline_.window(static_cast<uint32_t>(window_.state()), window_.ended());
}

Reducer::~Reducer() {
  if (has_left_) return;
  const std::lock_guard lock(mutex_);
  leave_behind(/*group_stays=*/false, interruption_->is_interrupted());
}

// -------------------------------------------------------------------------------------------------- between two windows

void Reducer::check_between_windows(const char* what) const {
  const bool is_between = !window_.has_begun() && !window_.is(WindowState::failed);
  TORCH_CHECK(is_between, "fastddp: ", what, " between two windows only, not while one is ", to_string(window_.state()),
              see("FD014"));
  TORCH_CHECK(!reduction_.is_conducted(), "fastddp: ", what, " when no communication hook runs", see("FD014"));
}

void Reducer::set_way(std::shared_ptr<Way> way, const std::optional<Plan>& plan) {
  way->meet(buckets_.device());
  const std::lock_guard lock(mutex_);
  constexpr auto what = "how gradients are exchanged can be changed";
  check_between_windows(what);
  TORCH_CHECK_VALUE(!way->is_taken,
                    "fastddp: a way belongs to one reducer, and this one has its reducer already. Make another one.");
  const auto is_never_used = [&](size_t parameter) { return window_.knows_first() && !window_.ever_used(parameter); };
  std::optional<Buckets::Others> others;
  if (plan && !buckets_.are(*plan)) others = buckets_.others(*plan, is_never_used);
  auto next = driver_.prepare(way, others ? others->all : buckets_.all());
  check_between_windows(what);  // another thread may have begun one meanwhile
  if (others) buckets_.become(std::move(*others)), window_.set_buckets(*plan);
  driver_.take(std::move(next));
  if (has_streams(buckets_.device())) {
    auto groups = way->groups();
    groups.push_back(process_group_);
    interruption_->may_abort(std::move(groups));
  }
  tell_plan();
  try {
    const c10::AutoGradMode no_grad(false);
    buckets_.place_gradients();
  } catch (const std::exception&) {  // memory is short: they travel from where they are
  }
}

void Reducer::tell_plan() {
  std::vector<std::vector<size_t>> plan;
  std::vector<uint64_t> bytes;
  std::vector<c10::Device> devices;
  for (const auto& bucket : buckets_.all()) {
    plan.push_back(bucket.layout.parameters());
    bytes.push_back(static_cast<size_t>(bucket.layout.numbers()) * c10::elementSize(bucket.layout.format().dtype));
    devices.push_back(bucket.device());
  }
  timeline_.plan(std::move(plan), bytes, std::move(devices), [way = driver_.way(), device = buckets_.device()] {
    Progress::Sequences of_lanes;
    for (size_t lane = 0; lane < of_lanes.size(); ++lane) of_lanes[lane] = sequence_of(way->lane(lane, device));
    return Timeline::Begun(sequence_of(way->all.get()), of_lanes);
  });
}

void Reducer::use_memory(std::shared_ptr<const RegisteredMemory> memory) {
  const std::lock_guard lock(mutex_);
  check_between_windows("where wires come from can be changed");
  driver_.use_memory(std::move(memory));
  for (auto& bucket : buckets_.all()) bucket.wire.give_back();  // gradients that live there move with the next way
}

// ----------------------------------------------------------------------------------------------------- before a backward

void Reducer::begin_forward(bool grad_enabled) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !tell_lost_ || !lost_, closing_.failure().text());
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
  steps_.forward_begins();
  apply(WindowEvent::forward);
  timeline_.happened(What::opens);
}

template <typename Part>
void Reducer::may_lose(const Part& part) {
  try {
    part();
  } catch (const c10::DistError& error) {
    note_lost(in_words(error));
    if (!tell_lost_) throw;
    lose();
  }
}

// A forward inside a backward (activation checkpointing) belongs to the window that is reducing, and changes nothing.
void Reducer::arm(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  apply(WindowEvent::arm);
  backwards_.watch(outputs, [reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_begin();
  });
  if (!backwards_.are_seen_early()) reduction_.layers().remember();
}

// --------------------------------------------------------------------------------------------- from a gradient to its bucket

// A backward is best seen at the outputs of its forward. Its first gradient may come inside a reentrant checkpoint, which runs
// a backward of its own that ends sooner.
void Reducer::on_backward_begin() {
  const std::lock_guard lock(mutex_);
  if (is_local_) return;
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
  if (window_.has_begun()) notice_failure();
  backwards_.note([reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_end();
  });
  timeline_.happened(What::backward);
}

// Note [Before the first gradient]
// A window begins before autograd writes its first gradient: placeholders hold what gradients were until then. If the
// window began after that gradient, a placeholder would take it for an older one, and it would be averaged twice.
void Reducer::before_gradient(size_t parameter, bool is_defined) {
  reduction_.begin_sum(parameter, is_defined);
  if (steps_.may_be_skipped()) {  // mostly without the lock
    const std::lock_guard lock(mutex_);
    steps_.look_for_skipped();
  }
  if (open_ && asked_in_ != Backwards::number()) open_without_forward();
  if (window_.may_begin()) begin_with_gradient();
  if (!window_.expects_all()) {
    const std::lock_guard lock(mutex_);
    if (window_.is(WindowState::reducing)) reduction_.layers().look_at(parameter);
  }
  if (!is_defined || !buckets_.are_sharded()) return;
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  buckets_.tell(parameter, &Shard::take_notice);  // once: a placeholder of the window that begins has taken it
}

// Note [Windows without a forward]
// A module that is replicated in place has no wrapper whose forward every loss goes through. So its first gradient in a backward
// opens a window, if none is open: `open_` does what the wrapper's forward does, collectives included. What a forward decides
// elsewhere, the backward decides here: whether gradients stay on this rank (no_sync), and that a failed window is repaired.
// A backward over two devices has two threads; the one that comes later waits until the window is open.
void Reducer::open_without_forward() {
  if (!Backwards::is_inside_one()) return;
  const std::lock_guard one_at_a_time(opening_);
  if (asked_in_ == Backwards::number()) return;
  {
    const std::lock_guard lock(mutex_);
    const c10::AutoGradMode no_grad(false);
    notice_failure();
    if (window_.is(WindowState::failed)) repair();
    if (is_local_ && window_.is(WindowState::finished)) apply(WindowEvent::forward);  // what comes belongs to the next window
  }
  if (!is_local_ && !window_.is_open()) open_();
  asked_in_ = Backwards::number();
}

void Reducer::begin_with_gradient() {
  const std::lock_guard lock(mutex_);
  if (is_local_ || !window_.may_begin() || !Backwards::is_inside_one()) return;
  // Another backward over the last forward begins at its outputs (on_backward_begin), if they are watched.
  const bool is_another = window_.is(WindowState::finished);
  const bool comes_by_outputs = !backwards_.are_seen_early() || backwards_.is_noted_choice();
  if (is_another && (!window_.ends_with_backward() || !comes_by_outputs)) return;
  const bool was_seen = backwards_.last().runs();
  note_backward();
  TORCH_CHECK(was_seen || !window_.may_end_early() || !Backwards::is_inside_nested(), kBeginsInCheckpoint, see("FD011"));
  begin_reduction();
}

void Reducer::hand_over(size_t parameter, const at::Tensor& gradient) {
  were_handed_over_[parameter] = true;
  const bool is_wanted = window_.is_open() || window_.may_begin();
  if (!is_wanted || steps_inside_backward() || !hooks_.may_come_early(parameter)) return;
  before_gradient(parameter, /*is_defined=*/true);
  bool may_share = false;
  auto arriving = gradient;
  {
    const std::lock_guard lock(mutex_);
    if (!window_.is(WindowState::reducing) || !backwards_.last().runs()) return;
    const c10::AutoGradMode no_grad(false);
    if (!buckets_.form().in_main_grad) arriving = gradient.to(buckets_.gradient_dtype(parameter));
    may_share = may_share_memory(parameter, arriving);
  }
  hooks_.accumulate_early(parameter, arriving, may_share);
}

// A main gradient takes the sum at once. Otherwise a gradient leaves its memory only when it moves into the wire.
bool Reducer::may_share_memory(size_t parameter, const at::Tensor& gradient) const {
  if (buckets_.form().in_main_grad) return true;
  if (!buckets_.has(parameter) || !window_.comes_last_next(parameter)) return false;
  const auto& bucket = buckets_.all()[buckets_.place(parameter).bucket];
  return bucket.wire.is_planned() && !bucket.window.left_in_place && bucket.layout.format().dtype == gradient.scalar_type();
}

void Reducer::on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  const bool by_layer = reduction_.layers().have_added(parameter, incoming.defined());
  const std::lock_guard lock(mutex_);
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  const Range range("gradient", [&] {
    return " parameter=" + buckets_.name(parameter) + " bucket=" + std::to_string(buckets_.place(parameter).bucket);
  });
  const c10::AutoGradMode no_grad(false);
  if (buckets_.form().in_main_grad && (incoming.defined() || by_layer)) {
    TORCH_CHECK(by_layer || buckets_.parameters()[parameter].grad().defined(), "fastddp: ", buckets_.describe(parameter),
                kMainGradientIsGone, see("FD008"));
    buckets_.tell(parameter, &add_to_main);
    exclusive = false;
  }
  // Somebody called the accumulator by hand: there is no backward whose end could finish a window.
  if (!Backwards::is_inside_one()) return on_local_gradient(parameter, exclusive);
  // The window's backward is over: this gradient is of another one.
  if (window_.is(WindowState::reducing) && !backwards_.last().runs()) notice_failure();
  if (window_.is(WindowState::failed)) return;
  if (!window_.is(WindowState::reducing)) return on_local_gradient(parameter, exclusive);
  if (by_layer) reduction_.layers().note_written(parameter);
  may_lose([&] { reduction_.on_gradient(parameter, incoming, exclusive); });
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
  if (buckets_.form().of_16_bits) buckets_.tell(parameter, &settle, exclusive);
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
  steps_.look_for_skipped();
  const bool goes_on = window_.is(WindowState::partial);
  apply(WindowEvent::reduce);
  timeline_.happened(What::reduces);
  if (closing_.status_rides(driver_)) driver_.wait_before(driver_.status_tick());
  if (at_outputs) reduction_.layers().remember();
  may_lose([&] { reduction_.begin(goes_on); });
}

// --------------------------------------------------------------------------------------------------- the end of a backward

void Reducer::on_backward_end() {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  const auto ends = c10::make_scope_exit([&] { timeline_.happened(What::after_backward); });
  const Interruption::Scope interruptible(*interruption_, buckets_.device());
  if (!window_.is(WindowState::reducing)) return;
  may_lose([&] {
    if (!window_.expects_all()) reduction_.take_unseen();
    const auto turn = reduction_.conduct();
    if (window_.ends_with_backward()) {
      reduction_.complete_all_buckets();
    } else if (!reduction_.missing().empty()) {
      return apply(WindowEvent::lack);
    } else {
      reduction_.synchronise_local_gradients();
    }
    timeline_.happened(What::computed);
    finish_window();
  });
}

void Reducer::finish_window() {
  closing_.check_sparse_gradients();
  local_.measure_beside_buckets();
  closing_.say({.window = window_.ended(), .missed = missed_.exchange(0), .scale = local_.loss_scale()},
               local_.are_watched() ? &local_ : nullptr);
  const Timeline::Wait waits(timeline_, What::tick, driver_.next());
  while (driver_.has_ticks_left()) driver_.tick();
  // A user's hook may start collectives in callbacks, at moments that differ between ranks. Nothing else may start in between.
  const bool status_goes_first = !driver_.runs_users_code();
  if (status_goes_first) closing_.send_status(driver_);
  driver_.finish_all();
  if (!status_goes_first) closing_.send_status(driver_);
  // From here on we work on the caller's streams, which now wait for all gradients.
  driver_.join();
  timeline_.happened(What::closing);
  if (!closing_.receive_status(driver_)) {
    if (tell_lost_) return note_lost(closing_.failure().text()), lose();
    fail();
    TORCH_CHECK(false, closing_.failure().text(), see("FD010"));
  }
  closing_.exchange_sparse_gradients(driver_);
  closing_.exchange_late_gradients(driver_);
  timeline_.happened(What::closed);
  averaged_.closed();
  local_.judge(window_.ended(), process_group_->getSize(), closing_, *driver_.way());
  driver_.give_back();
  apply(WindowEvent::finish);
  reduction_.layers().window_finished();
  if (const auto& group = driver_.way()->all) reduction_.shared_sums().note(driver_.weighting(), group->getRank());
  steps_.window_finished();
  timeline_.happened(What::ends);
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

}  // namespace fastddp
