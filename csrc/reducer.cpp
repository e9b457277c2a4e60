#include "reducer.h"

#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <sstream>
#include <utility>

namespace fastddp {

const char* to_string(WindowState state) {
  static constexpr const char* names[] = {"idle", "accumulating", "armed", "reducing", "partial", "finished", "failed"};
  return names[static_cast<size_t>(state)];
}

// Travels in the callback that the autograd engine runs at the end of a backward. The engine drops callbacks when a
// backward raises, so the end of this object's life without a call tells that it did. On a device whose backward runs
// in a thread of the engine's, that may be a moment after the exception has reached the caller.
class Reducer::BackwardGuard {
 public:
  BackwardGuard(std::weak_ptr<Reducer> reducer, size_t backward) : reducer_(std::move(reducer)), backward_(backward) {}
  ~BackwardGuard() {
    if (const auto reducer = reducer_.lock(); reducer && !ended_) reducer->on_backward_raised(backward_);
  }
  void end() {
    if (const auto reducer = reducer_.lock()) reducer->on_backward_end();
    ended_ = true;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  size_t backward_;
  bool ended_ = false;
};

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 std::vector<std::vector<size_t>> plan, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                 bool gradient_as_bucket_view)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      process_group_(std::move(process_group)),
      gradient_as_bucket_view_(gradient_as_bucket_view),
      exchange_(make_all_reduce(Lanes({process_group_}))),
      hooks_(parameters_, [this](size_t parameter, bool exclusive) { on_gradient(parameter, exclusive); }) {
  TORCH_CHECK(names_.size() == parameters_.size(), "fastddp: ", names_.size(), " names for ", parameters_.size(),
              " parameters");
  set_plan(std::move(plan));
}

void Reducer::set_plan(std::vector<std::vector<size_t>> plan) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(state_ != WindowState::reducing && state_ != WindowState::partial && state_ != WindowState::failed,
              "fastddp: buckets can be replaced between two windows only, not while one is ", to_string(state_));
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
    TORCH_CHECK(places[parameter].bucket != nowhere, "fastddp: parameter ", names_[parameter],
                " is in no bucket of the plan");
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
  exchange_->prepare(buckets_);
  const c10::AutoGradMode no_grad(false);
  for (const auto parameter : movable) move_in(buckets_[places_[parameter].bucket], places_[parameter].member);
  if (arrivals_.empty()) arrivals_.assign(parameters_.size(), Arrival::none);
}

void Reducer::set_exchange(std::unique_ptr<Exchange> exchange) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(state_ == WindowState::idle || state_ == WindowState::accumulating || state_ == WindowState::finished,
              "fastddp: how gradients are exchanged can be changed between two windows only, not while one is ",
              to_string(state_));
  exchange_ = std::move(exchange);
  exchange_->prepare(buckets_);
}

void Reducer::begin_forward(bool grad_enabled) {
  const std::lock_guard lock(mutex_);
  const bool inside_backward = torch::autograd::get_current_graph_task_id() != -1;
  // A backward that still counts as running has raised: no forward outside of it begins before it ends.
  if (state_ == WindowState::reducing && !inside_backward) give_up_window();
  if (state_ == WindowState::failed && !inside_backward) repair();
  if (state_ == WindowState::partial && grad_enabled) fail_with_missing();
  if (state_ == WindowState::finished && grad_enabled) {
    reset_window();
    state_ = WindowState::idle;
  }
}

void Reducer::arm() {
  const std::lock_guard lock(mutex_);
  // A forward inside a backward (activation checkpointing) belongs to the window that is being reduced.
  if (state_ == WindowState::idle || state_ == WindowState::accumulating) state_ = WindowState::armed;
}

void Reducer::on_gradient(size_t parameter, bool exclusive) {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  // Somebody called the accumulator by hand: no end of a backward will come that could finish a window.
  if (torch::autograd::get_current_graph_task_id() == -1) return on_local_gradient(parameter);
  switch (state_) {
    case WindowState::idle:
    case WindowState::accumulating:
    case WindowState::finished:
      return on_local_gradient(parameter);
    case WindowState::armed:
    case WindowState::partial:
      begin_reduction();
      [[fallthrough]];
    case WindowState::reducing:
      return mark_ready(parameter, Arrival::ready, exclusive);
    case WindowState::failed:
      return;
  }
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
  if (state_ == WindowState::idle || state_ == WindowState::finished) state_ = WindowState::accumulating;
  if (arrivals_[parameter] == Arrival::none) arrivals_[parameter] = Arrival::local;
}

void Reducer::begin_reduction() {
  auto guard = std::make_shared<BackwardGuard>(weak_from_this(), ++backwards_);
  torch::autograd::Engine::get_default_engine().queue_callback([guard = std::move(guard)] { guard->end(); });
  state_ = WindowState::reducing;
}

void Reducer::mark_ready(size_t parameter, Arrival arrival, bool exclusive) {
  TORCH_CHECK(arrivals_[parameter] != Arrival::ready, "fastddp: ", describe(parameter),
              " got a second gradient in one window on rank ", process_group_->getRank(),
              ", after the first was handed to the exchange. Likely causes: two backward passes over one forward, or a "
              "parameter used inside several reentrant checkpoints. Add up the losses and call backward once, run all "
              "but the last backward under no_sync(), or use checkpoint(..., use_reentrant=False).");
  arrivals_[parameter] = arrival;
  if (windows_ == 0) arrival_order_.push_back(parameter);
  const auto [index, member] = places_[parameter];
  auto& bucket = buckets_[index];
  arrive(bucket, member, exclusive);
  exchange_->on_gradient(bucket, member);
  while (ticks_ < buckets_.size() && buckets_[ticks_].missing == 0) tick();
}

template <typename Function>
void Reducer::for_later_stages(const Function& function) {
  for (size_t stage = 1; stage < exchange_->collectives(); ++stage) {
    if (ticks_ >= stage && ticks_ - stage < buckets_.size()) function(stage, buckets_[ticks_ - stage]);
  }
}

// Note [Ticks]
// Tick k starts stage 0 of bucket k, stage 1 of bucket k - 1, and so on; ticks behind the last bucket start what is left
// of the later stages. A tick happens when its bucket and all before it are complete, so what is started in which order
// depends on the plan alone.
void Reducer::tick() {
  if (ticks_ < buckets_.size()) exchange_->start(0, buckets_[ticks_]);
  if (exchange_->collectives() > 1) end_tick();
  ++ticks_;
  finish_arrived();
}

void Reducer::end_tick() {
  {
    const auto on_side_streams = side_streams_.make_current();
    for_later_stages([&](size_t stage, Bucket& bucket) { exchange_->start(stage, bucket); });
  }
  side_streams_.wait_for_current_streams();
  const auto on_side_streams = side_streams_.make_current();
  exchange_->end_tick(ticks_);
}

// The last stage starts nothing, so it may run whenever its collective happens to be done.
void Reducer::finish_arrived() {
  const auto fully_started = ticks_ + 1 > exchange_->collectives() ? ticks_ + 1 - exchange_->collectives() : 0;
  while (finished_buckets_ < std::min(fully_started, buckets_.size()) &&
         exchange_->arrived(buckets_[finished_buckets_])) {
    finish_next();
  }
}

void Reducer::finish_next() {
  const auto on_side_streams = side_streams_.make_current();
  auto& bucket = buckets_[finished_buckets_++];
  exchange_->finish(bucket);
  keep_for_current_stream(bucket.wire);
}

void Reducer::on_backward_end() {
  const std::lock_guard lock(mutex_);
  const c10::AutoGradMode no_grad(false);
  if (state_ != WindowState::reducing) return;
  if (!without_gradient().empty()) {
    state_ = WindowState::partial;
    return;
  }
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (arrivals_[parameter] == Arrival::local) mark_ready(parameter, Arrival::carried, false);
  }
  finish_window();
}

size_t Reducer::ticks_of_a_window() const {
  return buckets_.size() + exchange_->collectives() - 1;
}

void Reducer::finish_window() {
  while (ticks_ < ticks_of_a_window()) tick();
  while (finished_buckets_ < buckets_.size()) finish_next();
  side_streams_.current_streams_wait();
  for (const auto& bucket : buckets_) keep_for_current_stream(bucket.wire);
  ++windows_;
  state_ = WindowState::finished;
}

void Reducer::on_backward_raised(size_t backward) {
  const std::lock_guard lock(mutex_);
  if (state_ == WindowState::reducing && backward == backwards_) give_up_window();
}

// Nothing that is in flight may write to wires once the next window uses them.
void Reducer::give_up_window() {
  {
    const auto on_side_streams = side_streams_.make_current();
    exchange_->drain();
  }
  side_streams_.synchronize();
  ++windows_;
  state_ = WindowState::failed;
}

void Reducer::repair() {
  for (; ticks_ < ticks_of_a_window(); ++ticks_) {
    if (ticks_ < buckets_.size()) exchange_->abandon(0, buckets_[ticks_]);
    for_later_stages([&](size_t stage, Bucket& bucket) { exchange_->abandon(stage, bucket); });
    if (exchange_->collectives() > 1) exchange_->end_tick(ticks_);
  }
  while (finished_buckets_ < buckets_.size()) exchange_->recover(buckets_[finished_buckets_++]);
  const c10::AutoGradMode no_grad(false);
  for (auto& bucket : buckets_) zero_wire(bucket);
  reset_window();
  state_ = WindowState::idle;
}

void Reducer::reset_window() {
  for (auto& bucket : buckets_) bucket.reset();
  arrivals_.assign(parameters_.size(), Arrival::none);
  ticks_ = 0;
  finished_buckets_ = 0;
}

void Reducer::check_complete() {
  const std::lock_guard lock(mutex_);
  if (state_ == WindowState::partial) fail_with_missing();
  TORCH_CHECK(
      state_ != WindowState::failed,
      "fastddp: an optimizer was about to use gradients of a backward that raised: some are averaged over ranks, "
      "some are not. Call zero_grad() and repeat forward and backward.");
}

void Reducer::fail_with_missing() {
  const auto missing = without_gradient();
  std::ostringstream list;
  constexpr size_t most = 10;
  for (size_t i = 0; i < std::min(missing.size(), most); ++i) list << "\n  " << describe(missing[i]);
  if (missing.size() > most) list << "\n  and " << missing.size() - most << " more";
  give_up_window();
  TORCH_CHECK(
      false, "fastddp: backward ended on rank ", process_group_->getRank(), " without a gradient for ", missing.size(),
      " of ", parameters_.size(), " parameters, so gradients are only partly synchronised:", list.str(),
      "\nEvery parameter that requires a gradient has to take part in computing the loss, on every rank. Likely "
      "causes: a layer that this forward did not use, or an output that the loss does not depend on. Remedies: "
      "use all parameters in the loss, set requires_grad=False on those never used before wrapping, or exclude "
      "them with _set_params_and_buffers_to_ignore_for_model. This window's gradients are void: call zero_grad() "
      "before the next forward.");
}

std::vector<size_t> Reducer::without_gradient() const {
  std::vector<size_t> missing;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const auto arrival = arrivals_[parameter];
    // zero_grad may have removed a gradient since it came.
    const bool has_local = arrival == Arrival::local && parameters_[parameter].grad().defined();
    if (arrival == Arrival::none || (arrival == Arrival::local && !has_local)) missing.push_back(parameter);
  }
  return missing;
}

std::string Reducer::describe(size_t parameter) const {
  std::ostringstream text;
  text << "parameter " << names_[parameter] << " (number " << parameter << ", bucket " << places_[parameter].bucket
       << ")";
  return text.str();
}

at::Tensor Reducer::measure() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(state_ == WindowState::finished,
              "fastddp: the norm of gradients is known between the backward that "
              "synchronises them and the next forward, not while the window is ",
              to_string(state_), ".");
  const c10::AutoGradMode no_grad(false);
  const auto device = buckets_.front().device();
  std::vector<at::Tensor> pairs{at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device))};
  for (auto& bucket : buckets_) {
    for (const auto& measured : exchange_->measure(bucket)) {
      keep_for_current_stream(measured);
      pairs.push_back(add_up(measured).to(device));
    }
  }
  return at::stack(pairs).sum(0);
}

size_t Reducer::windows() const {
  const std::lock_guard lock(mutex_);
  return windows_;
}

std::vector<size_t> Reducer::arrival_order() const {
  const std::lock_guard lock(mutex_);
  return windows_ > 0 ? arrival_order_ : std::vector<size_t>{};
}

}  // namespace fastddp
