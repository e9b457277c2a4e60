#include "reducer/reducer.h"

#include "bucket/bucket_range.h"
#include "transport/works.h"

#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>
#include <sstream>
#include <utility>

namespace fastddp {

const char* to_string(WindowState state) {
  static constexpr const char* names[] = {"idle", "accumulating", "armed", "reducing", "partial", "finished", "failed"};
  return names[static_cast<size_t>(state)];
}

constexpr auto kGradientIsGone =
    " got a gradient that is not in parameter.grad, so it cannot be averaged. Likely causes: the backward ran inside a "
    "context of torch.distributed.autograd, which keeps gradients to itself: call loss.backward() outside of it. Or a hook "
    "took the gradient away: attach an optimizer that steps inside backward with "
    "torch.distributed.optim._apply_optimizer_in_backward, before the first forward.";

constexpr auto kUsageChanged =
    " got a gradient on this rank, but none in the first step, after which static_graph (or "
    "skip_all_reduce_unused_params) lets nothing change. Use find_unused_parameters=True instead if the parameters in use "
    "differ from step to step.";

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 std::vector<std::vector<size_t>> plan, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                 bool gradient_as_bucket_view, Expect expect, std::vector<size_t> sparse)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      process_group_(std::move(process_group)),
      gradient_as_bucket_view_(gradient_as_bucket_view),
      sparse_(std::move(sparse)),
      held_(*this, parameters_),
      exchange_(make_pipeline(make_cast(std::nullopt), make_all_reduce(Lanes({process_group_})))),
      usage_(parameters_.size(), expect),
      ready_times_(parameters_),
      hooks_(parameters_, [this](size_t parameter, const at::Tensor& incoming, bool exclusive) {
        on_gradient(parameter, incoming, exclusive);
      }) {
  TORCH_CHECK(names_.size() == parameters_.size(), "fastddp: ", names_.size(), " names for ", parameters_.size(),
              " parameters");
  exchange_->called_under(mutex_);
  set_plan(std::move(plan));
}

// What is in flight on a device goes on using the wires, and the memory of these is about to be free. (On the CPU, works hold
// what they use.)
Reducer::~Reducer() {
  hooks_.remove();
  if (state_ != WindowState::reducing && state_ != WindowState::partial) return;
  if (!has_streams(parameters_.front().device())) return;
  const std::lock_guard lock(mutex_);
  exchange_->drain();
  for (const auto& bucket : buckets_) keep_for_current_stream(bucket.wire);
}

void Reducer::set_plan(std::vector<std::vector<size_t>> plan) {
  const std::lock_guard lock(mutex_);
  check_between_windows("buckets can be replaced");
  sampler_.forget();
  const auto nowhere = plan.size();
  std::vector<Place> places(parameters_.size(), {nowhere, 0});
  for (size_t bucket = 0; bucket < plan.size(); ++bucket) {
    for (size_t member = 0; member < plan[bucket].size(); ++member) {
      const auto parameter = plan[bucket][member];
      TORCH_CHECK(parameter < parameters_.size() && places[parameter].bucket == nowhere, "fastddp: parameter ",
                  parameter, " of bucket ", bucket, " does not exist or is in two buckets of the plan");
      places[parameter] = {bucket, member};
    }
  }
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const bool is_unused = usage_.is_known() && !usage_.ever_used(parameter);
    TORCH_CHECK(places[parameter].bucket != nowhere || is_unused || is_sparse(parameter), "fastddp: parameter ",
                names_[parameter], " is in no bucket of the plan");
  }
  places_ = std::move(places);
  std::vector<size_t> movable;  // parameters whose gradients live in a wire that goes
  for (const auto& bucket : buckets_) {
    for (const auto member : movable_members(bucket)) movable.push_back(bucket.members[member]);
  }
  const auto previous = std::exchange(buckets_, {});
  for (size_t bucket = 0; bucket < plan.size(); ++bucket) {
    buckets_.emplace_back(bucket, plan.size(), std::move(plan[bucket]), parameters_, names_, gradient_as_bucket_view_);
    side_streams_.add(buckets_.back().device());
  }
  exchange_->prepare(buckets_, side_streams_);
  const c10::AutoGradMode no_grad(false);
  for (const auto parameter : movable) move_in(buckets_[places_[parameter].bucket], places_[parameter].member);
  if (arrivals_.empty()) arrivals_.assign(parameters_.size(), Arrival::none);
  expect_gradients();
}

void Reducer::set_expect(Expect expect) {
  const std::lock_guard lock(mutex_);
  check_between_windows("what is expected of gradients can be changed");
  usage_ = Usage(parameters_.size(), expect);
  expect_gradients();
}

void Reducer::share_order() {
  const std::lock_guard lock(mutex_);
  shares_order_ = true;
}

void Reducer::fix_usage() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(usage_.is_known(), "fastddp: it is not known yet which parameters are used");
  usage_.fix();
  expect_gradients();
}

bool Reducer::knows_usage() const {
  const std::lock_guard lock(mutex_);
  return usage_.is_known();
}

std::vector<size_t> Reducer::used_parameters() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> used;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (usage_.ever_used(parameter)) used.push_back(parameter);
  }
  return used;
}

void Reducer::expect_gradients() {
  for (auto& bucket : buckets_) {
    bucket.missing = std::ranges::count_if(bucket.members, [&](auto parameter) { return usage_.waits_for(parameter); });
  }
}

void Reducer::check_between_windows(const char* what) const {
  TORCH_CHECK(state_ != WindowState::reducing && state_ != WindowState::partial && state_ != WindowState::failed,
              "fastddp: ", what, " between two windows only, not while one is ", to_string(state_));
  TORCH_CHECK(!conductor_.is_busy(), "fastddp: ", what, " when no communication hook runs");
}

void Reducer::set_exchange(std::shared_ptr<Exchange> exchange) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(state_ == WindowState::idle || state_ == WindowState::accumulating || state_ == WindowState::finished,
              "fastddp: how gradients are exchanged can be changed between two windows only, not while one is ",
              to_string(state_));
  TORCH_CHECK(!conductor_.is_busy(), "fastddp: a communication hook cannot be replaced while it runs");
  exchange->called_under(mutex_);
  exchange_ = std::move(exchange);
  exchange_->set_average(average_);
  exchange_->prepare(buckets_, side_streams_);
}

void Reducer::set_average(const Average& average) {
  const std::lock_guard lock(mutex_);
  average_ = average;
  exchange_->set_average(average);
}

void Reducer::on_averaged(std::function<void(const std::vector<size_t>&)> callback) {
  const std::lock_guard lock(mutex_);
  on_averaged_ = std::move(callback);
}

void Reducer::begin_forward(bool grad_enabled) {
  const std::lock_guard lock(mutex_);
  if (torch::autograd::get_current_graph_task_id() == -1) {
    if (!grad_enabled && backward_.runs()) return;  // in another thread, and none of this forward's business
    let_backward_elsewhere_end();
    notice_failure();
    backward_ = {};
    if (state_ == WindowState::failed) repair();
  }
  TORCH_CHECK(state_ != WindowState::partial || !grad_enabled,
              "fastddp: a forward began while gradients of the last window are missing");
  if (state_ == WindowState::finished && grad_enabled) {
    reset_window();
    state_ = WindowState::idle;
  }
  if (!step_is_open_ && grad_enabled) {
    step_is_open_ = true;
    step_.begin();
    sampler_.step_begins(parameters_.front().device());
    ready_times_.begin_window();
  }
}

void Reducer::arm(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  // A forward inside a backward (activation checkpointing) belongs to the window that is being reduced.
  if (state_ == WindowState::idle || state_ == WindowState::accumulating) state_ = WindowState::armed;
  ++forwards_;
  arms_by_outputs_ = on_backward_through(outputs, [reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_begin();
  });
}

// The first gradient may come inside a reentrant checkpoint, whose backward is one of its own and ends sooner.
void Reducer::on_backward_begin() {
  const std::lock_guard lock(mutex_);
  // torch.autograd.grad, or backward to a choice of tensors: if it brings gradients, the first one begins.
  if (!torch::autograd::get_current_graph_task_exec_info()->empty()) return;
  note_backward();
  // Where every window brings every gradient, a backward that brings none is none: it trains what is in front of the model.
  if (usage_.is_known_beforehand()) return;
  if (state_ == WindowState::finished && usage_.settles_at_end()) begin_another_reduction();
  if (state_ == WindowState::armed || state_ == WindowState::partial) begin_reduction();
}

// The outermost one: a reentrant checkpoint runs a backward inside of it.
void Reducer::note_backward() {
  if (backward_.runs()) return;
  if (state_ == WindowState::reducing || state_ == WindowState::partial) notice_failure();
  backward_ = Backward::current();
  const auto number = torch::autograd::get_current_graph_task_id();
  lost_a_backward_ = last_backward_ >= 0 && number > last_backward_ + 1;
  last_backward_ = number;
  torch::autograd::Engine::get_default_engine().queue_callback([reducer = weak_from_this()] {
    if (const auto alive = reducer.lock()) alive->on_backward_end();
  });
}

void Reducer::on_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  const std::lock_guard lock(mutex_);
  const Range range("gradient", names_[parameter], places_[parameter].bucket);
  const c10::AutoGradMode no_grad(false);
  // Somebody called the accumulator by hand: no end of a backward will come that could finish a window.
  if (torch::autograd::get_current_graph_task_id() == -1) return on_local_gradient(parameter);
  if (state_ == WindowState::reducing && !backward_.runs())
    notice_failure();  // of another backward than this gradient's
  switch (state_) {
    case WindowState::finished:
      // Another backward over that forward begins at its outputs (on_backward_begin), where they are known.
      if (!usage_.settles_at_end() || arms_by_outputs_) return on_local_gradient(parameter);
      begin_another_reduction();
      break;
    case WindowState::idle:
    case WindowState::accumulating:
      return on_local_gradient(parameter);
    case WindowState::armed:
    case WindowState::partial:
      begin_reduction();
      break;
    case WindowState::reducing:
      break;
    case WindowState::failed:
      return;
  }
  on_synchronised_gradient(parameter, incoming, exclusive);
}

void Reducer::on_local_gradient(size_t parameter) {
  if (state_ == WindowState::finished) {
    TORCH_CHECK(arrivals_[parameter] != Arrival::carried, "fastddp: ", describe(parameter),
                " got a gradient after the gradients of its window were synchronised. It had one from a backward under "
                "no_sync and none from the backward that synchronised, which therefore counted as the last one. Run "
                "all but the last backward of a window under no_sync().");
    TORCH_WARN(
        "fastddp: a backward ran after the gradients of the last forward had been synchronised; its gradients stay on "
        "this rank until the next synchronisation. Add up the losses of one forward and call backward once, or run all "
        "but the last backward under no_sync().");
    reset_window();
  }
  TORCH_CHECK(has_bucket(parameter) || is_sparse(parameter), "fastddp: ", describe(parameter), kUsageChanged);
  if (state_ == WindowState::idle || state_ == WindowState::finished) state_ = WindowState::accumulating;
  if (arrivals_[parameter] == Arrival::none) arrivals_[parameter] = Arrival::local;
}

void Reducer::begin_reduction() {
  note_backward();
  state_ = WindowState::reducing;
  window_.begin();
  sampler_.backward_begins(buckets_.size());
  const bool in_company = shares_order_ || held_.others_share_group();
  waits_for_end_ = usage_.is_learning() || (usage_.settles_at_end() && in_company);
  is_shared_ = held_.others_react();
  TORCH_CHECK(
      !is_shared_ || !gradient_as_bucket_view_,
      "fastddp: another DistributedDataParallel of this process averages gradients of the same parameters in this "
      "backward, and with gradient_as_bucket_view=True a gradient lives in the buckets of one of them only. Wrap "
      "without gradient_as_bucket_view, or wrap these parameters once.");
  for (auto& bucket : buckets_) bucket.is_shared = is_shared_;
  if (usage_.is_known_beforehand() || usage_.is_learning()) return;
  const c10::AutoGradMode no_grad(false);
  for (auto& bucket : buckets_) {
    for (size_t member = 0; member < bucket.members.size(); ++member) {
      const bool is_new = !bucket.gradients[member].stood_in;
      if (is_new && !usage_.waits_for(bucket.members[member])) let_stand_in(bucket, member);
    }
  }
  start_complete_buckets();
}

void Reducer::start_complete_buckets() {
  if (conductor_.is_busy()) return;
  const Conductor::Turn turn(conductor_, mutex_);
  const auto can_tick = [&] { return state_ == WindowState::reducing && !waits_for_end_ && ticks_ < buckets_.size(); };
  while (can_tick() && buckets_[ticks_].missing == 0) tick();
}

void Reducer::begin_another_reduction() {
  reset_window();
  ready_times_.begin_window();
  begin_reduction();
}

void Reducer::on_synchronised_gradient(size_t parameter, const at::Tensor& incoming, bool exclusive) {
  const auto hook = usage_.count(parameter);
  // Hooks also run in a part of the graph that the loss does not depend on, where there is nothing to accumulate.
  const bool is_gradient = incoming.defined() || usage_.is_known_beforehand();
  if (is_gradient) {
    check_expected(parameter, hook);
    const bool is_gone = incoming.defined() && !parameters_[parameter].grad().defined();
    TORCH_CHECK(!is_gone, "fastddp: ", describe(parameter), kGradientIsGone);
    if (windows_ == 0 && arrivals_[parameter] != Arrival::ready) arrival_order_.push_back(parameter);
    arrivals_[parameter] = Arrival::ready;
    ready_times_.note(parameter);
  }
  if (!has_bucket(parameter)) return;
  const auto [index, member] = places_[parameter];
  auto& bucket = buckets_[index];
  bucket.producers.note(bucket.device());
  if (hook == Usage::Hook::last) complete(parameter, exclusive);
  if (hook == Usage::Hook::unexpected && incoming.defined()) note_unexpected(bucket, member, incoming);
}

void Reducer::check_expected(size_t parameter, Usage::Hook hook) const {
  TORCH_CHECK(hook != Usage::Hook::too_many, "fastddp: ", describe(parameter),
              " got a second gradient in one window on rank ", process_group_->getRank(),
              ", after the first was handed to the exchange. Likely causes: two backward passes over one forward, or a "
              "parameter used inside several reentrant checkpoints. Add up the losses and call backward once, run all "
              "but the last backward under no_sync(), or use checkpoint(..., use_reentrant=False).");
  TORCH_CHECK(usage_.settles_at_end() || hook != Usage::Hook::unexpected, "fastddp: ", describe(parameter),
              kUsageChanged);
}

void Reducer::complete(size_t parameter, bool exclusive) {
  if (!has_bucket(parameter)) return;
  const auto [index, member] = places_[parameter];
  auto& bucket = buckets_[index];
  if (usage_.is_known_beforehand() || came(parameter)) {
    if (is_shared_) leave_wire(bucket, member);
    arrive(bucket, member, exclusive && !is_shared_);
    exchange_->on_gradient(bucket, member);
  } else {
    let_stand_in(bucket, member);
  }
  if (--bucket.missing == 0) {
    const BucketRange moment("ready", bucket);
    sampler_.ready(bucket.index, bucket.device());
  }
  start_complete_buckets();
}

void Reducer::tick() {
  const WaitClock::Wait wait(*wait_clock_, windows_, std::min(ticks_ + 1, buckets_.size()));
  const auto waited = waited_for_collectives;
  const auto lag = exchange_->lag();
  const bool begins = ticks_ < buckets_.size();
  const auto device_of = [&](size_t bucket) { return buckets_[bucket].device(); };
  if (begins) sampler_.ready(ticks_, device_of(ticks_));  // it may have been settled without all of its gradients
  exchange_->tick(ticks_);
  if (begins) sampler_.started(ticks_, device_of(ticks_));
  if (ticks_ >= lag) {
    const auto ended = ticks_ - lag;
    if (const auto call = sampler_.when_arrived(ended, device_of(ended)))
      exchange_->when_arrived(buckets_[ended], call);
  }
  ++ticks_;
  finish_arrived();
  sampler_.blocked(waited_for_collectives - waited);
}

void Reducer::finish_arrived() {
  if (is_shared_) return;
  const auto fully_started = ticks_ - std::min(ticks_, exchange_->lag());
  while (finished_buckets_ < fully_started && exchange_->arrived(buckets_[finished_buckets_])) {
    finish_next();
  }
}

void Reducer::finish_next() {
  const auto on_side_streams = side_streams_.make_current();
  auto& bucket = buckets_[finished_buckets_++];
  exchange_->finish(bucket);
  sampler_.finished(bucket.index, bucket.device());
  keep_for_current_stream(bucket.wire);
  // Otherwise it is only known at the end of the window what becomes of gradients.
  if (!on_averaged_ || !usage_.is_known_beforehand()) return;
  report_averaged(bucket.members);
  // An optimizer that has stepped frees its gradients, and others are to have their memory.
  bucket.held.let_go();
}

void Reducer::on_backward_end() {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  if (state_ != WindowState::reducing) return;
  const Conductor::Turn turn(conductor_, mutex_);
  if (usage_.settles_at_end()) {
    settle_missing();
  } else if (!without_gradient().empty()) {
    state_ = WindowState::partial;
    return;
  } else {
    carry_local_gradients();
  }
  sampler_.computed();
  finish_window();
}

void Reducer::carry_local_gradients() {
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (arrivals_[parameter] != Arrival::local || !usage_.waits_for(parameter)) continue;
    arrivals_[parameter] = Arrival::carried;
    complete(parameter, false);
  }
}

size_t Reducer::ticks_of_a_window() const {
  return buckets_.size() + exchange_->lag();
}

void Reducer::reset_window() {
  for (auto& bucket : buckets_) bucket.reset();
  usage_.begin_window();
  expect_gradients();
  arrivals_.assign(parameters_.size(), Arrival::none);
  ticks_ = 0;
  finished_buckets_ = 0;
  forwards_ = 0;
  status_.reset();
  status_is_received_ = false;
  sparse_is_sent_ = false;
  late_sent_ = 0;
}

std::vector<size_t> Reducer::missing() const {
  const std::lock_guard lock(mutex_);
  return without_gradient();
}

std::vector<size_t> Reducer::without_gradient() const {
  std::vector<size_t> missing;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (!usage_.waits_for(parameter) || usage_.is_final(parameter)) continue;
    if (arrivals_[parameter] != Arrival::local || !came(parameter)) missing.push_back(parameter);
  }
  return missing;
}

// zero_grad may have removed a gradient since it came.
bool Reducer::came(size_t parameter) const {
  return arrivals_[parameter] != Arrival::none && parameters_[parameter].grad().defined();
}

bool Reducer::is_sparse(size_t parameter) const {
  return std::ranges::find(sparse_, parameter) != sparse_.end();
}

bool Reducer::has_bucket(size_t parameter) const {
  return places_[parameter].bucket < buckets_.size();
}

std::string Reducer::describe(size_t parameter) const {
  std::ostringstream text;
  text << "parameter " << names_[parameter] << " (number " << parameter << ", ";
  if (has_bucket(parameter)) text << "bucket " << places_[parameter].bucket << ")";
  if (!has_bucket(parameter)) text << (is_sparse(parameter) ? "sparse)" : "in no bucket)");
  return text.str();
}

at::Tensor Reducer::measure() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(state_ == WindowState::finished,
              "fastddp: the norm of gradients is known between the backward that "
              "synchronises them and the next forward, not while the window is ",
              to_string(state_), ".");
  const c10::AutoGradMode no_grad(false);
  const auto device = parameters_.front().device();
  std::vector<at::Tensor> pairs{at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device))};
  for (auto& bucket : buckets_) {
    for (const auto& measured : bucket.amended ? measure_gradients(bucket) : exchange_->measure(bucket)) {
      keep_for_current_stream(measured);
      pairs.push_back(add_up(measured).to(device));
    }
  }
  for (const auto parameter : sparse_) {
    const auto& gradient = parameters_[parameter].grad();
    if (gradient.defined()) pairs.push_back(add_up(measure_with_operators(gradient.values())).to(device));
  }
  return at::stack(pairs).sum(0);
}

void Reducer::sample_every(size_t steps) {
  const std::lock_guard lock(mutex_);
  sampler_.set_every(steps);
}

std::optional<StepTimes> Reducer::sampled() const {
  const std::lock_guard lock(mutex_);
  return sampler_.last();
}

void Reducer::take_ready_times(bool taking) {
  const std::lock_guard lock(mutex_);
  ready_times_.take(taking);
}

std::vector<std::vector<double>> Reducer::ready_times() const {
  const std::lock_guard lock(mutex_);
  return ready_times_.seconds();
}

std::vector<size_t> Reducer::arrival_order() const {
  const std::lock_guard lock(mutex_);
  return windows_ > 0 ? arrival_order_ : std::vector<size_t>{};
}

}  // namespace fastddp
