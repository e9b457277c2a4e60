#include "peers.h"

#include <chrono>

namespace fake_cuda {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(1);

std::string key(uint64_t number) {
  return "collective " + std::to_string(number);
}

}  // namespace

void Peers::start() {
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Peers::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void Peers::announce(const OpPtr& collective) {
  const std::lock_guard lock(mutex_);
  pending_.push_back(collective);
  changed_.notify_all();
}

void Peers::call(const OpPtr& collective) {
  uint64_t from = 0, to = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto place = std::ranges::find(pending_, collective);
    if (place == pending_.end()) return;  // it has run, or is running
    from = std::max(called_, first_);
    to = first_ + static_cast<uint64_t>(place - pending_.begin()) + 1;
    called_ = std::max(called_, to);
    changed_.notify_all();
  }
  for (auto number = from; number < to; ++number) store_->set(key(number), std::vector<uint8_t>{1});
}

bool Peers::is_called(uint64_t number) {
  try {
    return store_->check({key(number)});
  } catch (const std::exception&) {
    return false;  // the process that holds the store is gone
  }
}

void Peers::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopped_ || !pending_.empty(); });
    if (pending_.empty()) return;
    const auto number = first_;
    if (!stopped_ && number >= called_) {
      lock.unlock();
      const bool called = is_called(number);
      lock.lock();
      if (!called) {
        changed_.wait_for(lock, kBetweenLooks);
        continue;
      }
    }
    const auto collective = pending_.front();
    pending_.pop_front();
    ++first_;
    lock.unlock();
    Simulator::get().run_collective(collective);
    lock.lock();
  }
}

}  // namespace fake_cuda
