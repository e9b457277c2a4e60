#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "guard.h"

namespace fake_cuda {
namespace {

constexpr size_t kAlignment = 512;

struct Block {
  char* address;
  size_t size;
  Queue* owner;  // null for pinned memory
  std::vector<Queue*> users;
  std::vector<OpPtr> readers;  // of pinned memory
  int capture;                 // within which it was made, and within which alone it is given out again
  OpPtr poisoned;              // when it is free: done once it can be given out; null: at once
  bool live = true;
};

void poison(char* address, size_t size) {
  std::memset(address, 0xFF, size);
}

class Pool {
 public:
  Block& allocate(size_t bytes, Queue* owner) {
    const auto size = std::max<size_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
    const auto capture = owner == nullptr ? 0 : Simulator::get().capture_of(*owner);
    auto& free = free_[{owner, size, capture}];
    const auto found = std::ranges::find_if(
        free, [](const auto& entry) { return entry.second->poisoned == nullptr || entry.second->poisoned->done; });
    Block* block = nullptr;
    if (found != free.end()) {
      block = found->second;
      free.erase(found);
      block->live = true;
      block->poisoned = nullptr;
    } else {
      if (owner == nullptr) Simulator::get().check_no_capture("memory is pinned");
      auto* address = static_cast<char*>(std::aligned_alloc(kAlignment, size));
      poison(address, size);
      block = &blocks_.emplace(address, Block{address, size, owner, {}, {}, capture, nullptr}).first->second;
    }
    allocated += size;
    peak = std::max(peak, allocated);
    return *block;
  }

  void free(char* address) {
    auto& simulator = Simulator::get();
    auto& block = blocks_.at(address);
    block.live = false;
    allocated -= block.size;
    const auto overwrite = [address, size = block.size] { poison(address, size); };
    if (block.capture != 0) {
      // A replay writes it again: after the capture it is nobody else's.
      if (!block.users.empty() || simulator.capture_of(*block.owner) != block.capture) return;
      simulator.enqueue(*block.owner, overwrite);
    } else if (block.owner != nullptr && block.users.empty() && !block.owner->capturing) {
      simulator.enqueue(*block.owner, overwrite);
    } else {
      auto before = std::exchange(block.readers, {});
      for (auto* user : std::exchange(block.users, {})) before.push_back(user->last);
      if (block.owner != nullptr) before.push_back(block.owner->last);
      block.poisoned = simulator.enqueue_unordered(overwrite, std::move(before));
    }
    free_[{block.owner, block.size, block.capture}].emplace(address, &block);
  }

  // The block that the address is in, live or not; null if it is in none.
  Block* find(const void* address) {
    const auto* place = static_cast<const char*>(address);
    auto above = blocks_.upper_bound(const_cast<char*>(place));
    if (above == blocks_.begin()) return nullptr;
    auto& block = std::prev(above)->second;
    return place < block.address + block.size ? &block : nullptr;
  }

  size_t allocated = 0;
  size_t peak = 0;

 private:
  std::map<char*, Block> blocks_;
  // By address: torch's allocator takes the lowest, too, so that a repeated step comes to use the same memory.
  std::map<std::tuple<Queue*, size_t, int>, std::map<char*, Block*>> free_;
};

Pool& device_pool() {
  static auto* pool = new Pool();
  return *pool;
}

Pool& pinned_pool() {
  static auto* pool = new Pool();
  return *pool;
}

void free_device(void* address) {
  const std::lock_guard lock(Simulator::get().mutex());
  device_pool().free(static_cast<char*>(address));
}

void free_pinned(void* address) {
  const std::lock_guard lock(Simulator::get().mutex());
  pinned_pool().free(static_cast<char*>(address));
}

class DeviceAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) return {nullptr, device};
    const std::lock_guard lock(Simulator::get().mutex());
    auto* address = device_pool().allocate(bytes, &current_queue(device.index())).address;
    return {address, address, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

class PinnedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    const std::lock_guard lock(Simulator::get().mutex());
    auto* address = pinned_pool().allocate(bytes, nullptr).address;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

void record_use(void* address, Queue& queue) {
  const std::lock_guard lock(Simulator::get().mutex());
  auto* block = device_pool().find(address);
  if (block == nullptr || block->owner == &queue) return;
  if (std::ranges::find(block->users, &queue) == block->users.end()) block->users.push_back(&queue);
}

bool is_pinned(const void* address) {
  const std::lock_guard lock(Simulator::get().mutex());
  return pinned_pool().find(address) != nullptr;
}

void record_pinned_use(const void* address, OpPtr reader) {
  const std::lock_guard lock(Simulator::get().mutex());
  // A captured copy reads at every replay: nothing but its owner can keep the memory for it.
  if (reader->captured) return;
  if (auto* block = pinned_pool().find(address)) block->readers.push_back(std::move(reader));
}

bool is_memory(const void* address, size_t bytes, c10::DeviceIndex device, bool live) {
  const std::lock_guard lock(Simulator::get().mutex());
  const auto* block = device_pool().find(address);
  return block != nullptr && (block->live || !live) && block->owner->device == device &&
         static_cast<const char*>(address) + bytes <= block->address + block->size;
}

size_t allocated_bytes() {
  return device_pool().allocated;
}

size_t peak_bytes() {
  return device_pool().peak;
}

void reset_peak() {
  device_pool().peak = device_pool().allocated;
}

}  // namespace fake_cuda
