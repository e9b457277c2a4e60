
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "device.h"

namespace fake_cuda {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xFF;

struct Block {
  char* address;
  size_t capacity;
  size_t size;                      // what was asked for
  Queue* owner;                     // null: pinned
  const Graph* graph;               // the capture that it was made in
  bool allocated = true;            // and not freed
  std::vector<Queue*> users{};      // streams other than the owner
  std::vector<OpPtr> copies{};      // of pinned memory
  std::vector<OpPtr> free_after{};  // freed; reusable when these are done

  bool is_reusable() const {
    return std::ranges::all_of(free_after, [](const OpPtr& op) { return op->done.load(); });
  }
  Work overwrite() const {
    return {"overwrite freed memory", [to = address, bytes = capacity] { std::memset(to, kPoison, bytes); }};
  }
};

// Blocks of one power of two each, so that different requests meet the same memory often.
class Pool {
 public:
  // `owner` null: pinned memory.
  char* allocate(size_t bytes, Queue* owner) {
    const std::lock_guard lock(mutex_);
    const auto capacity = std::bit_ceil(std::max(bytes, kAlignment));
    const auto* graph = owner == nullptr ? nullptr : owner->capture;
    auto& freed = freed_[{owner, graph, capacity}];
    const auto reusable = std::ranges::find_if(freed, [](const auto& entry) { return entry.second->is_reusable(); });
    Block* block = nullptr;
    if (reusable != freed.end()) {
      block = reusable->second;
      freed.erase(reusable);
    } else {
      if (owner == nullptr) check_no_capture("memory is pinned");
      auto* address = static_cast<char*>(std::aligned_alloc(kAlignment, capacity));
      TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "no memory for ", bytes, " bytes");
      std::memset(address, kPoison, capacity);
      block = &blocks_.emplace(address, Block{address, capacity, bytes, owner, graph}).first->second;
    }
    block->size = bytes;
    block->allocated = true;
    block->free_after.clear();
    if (owner != nullptr) peak_bytes = std::max<size_t>(peak_bytes, allocated_bytes += rounded(bytes));
    return block->address;
  }

  void free(char* address) {
    const std::lock_guard lock(mutex_);
    auto& block = blocks_.at(address);
    block.allocated = false;
    block.owner == nullptr ? free_pinned(block) : free_on_device(block);
  }

  // The block that the address is in; null if it is in none.
  template <typename Use>
  auto with_block(const void* address, Use use) {
    const std::lock_guard lock(mutex_);
    auto above = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    Block* block = above == blocks_.begin() ? nullptr : &std::prev(above)->second;
    if (block != nullptr && static_cast<const char*>(address) >= block->address + block->capacity) block = nullptr;
    return use(block);
  }

 private:
  static size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // Copies that only a graph will run hold nothing: whoever replays it keeps its pinned memory.
  void free_pinned(Block& block) {
    block.free_after = std::exchange(block.copies, {});
    auto overwrite = block.overwrite();
    if (block.is_reusable()) {
      overwrite.body();
    } else {
      overwrite.after = block.free_after;
      block.free_after = {Simulator::get().enqueue_anywhere(std::move(overwrite))};
    }
    freed_[{nullptr, nullptr, block.capacity}].emplace(block.address, &block);
  }

  void free_on_device(Block& block) {
    auto& simulator = Simulator::get();
    allocated_bytes -= rounded(block.size);
    const auto users = std::exchange(block.users, {});
    const bool captured = block.owner->capture != nullptr;
    if (block.graph != block.owner->capture) return;  // a graph's memory stays its own: a replay writes it
    if (captured && !users.empty()) return;           // nobody knows when they are done: not reused at all
    auto overwrite = block.overwrite();
    if (users.empty()) {
      simulator.enqueue(*block.owner, std::move(overwrite));
    } else {
      for (const auto* user : users) overwrite.after.push_back(simulator.last(*user));
      overwrite.after.push_back(simulator.last(*block.owner));
      block.free_after = {simulator.enqueue_anywhere(std::move(overwrite))};
    }
    freed_[{block.owner, block.graph, block.capacity}].emplace(block.address, &block);
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  // Lowest address first, as torch's allocator: so a step that repeats comes to use the same memory.
  std::map<std::tuple<Queue*, const Graph*, size_t>, std::map<char*, Block*>> freed_;
};

// Never destroyed, as the simulator.
Pool& pool() {
  static auto* pool = new Pool();
  return *pool;
}

void free_memory(void* address) {
  if (address != nullptr) pool().free(static_cast<char*>(address));
}

class PoolAllocator : public c10::Allocator {
 public:
  explicit PoolAllocator(bool pinned) : pinned_(pinned) {}

  c10::DataPtr allocate(size_t bytes) override {
    const auto device = pinned_ ? c10::Device(c10::kCPU) : current_device();
    if (bytes == 0) return {nullptr, device};
    auto* address = pool().allocate(bytes, pinned_ ? nullptr : &current_queue(device.index()));
    return {address, address, &free_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    TORCH_CHECK(false, "nobody copies storages");
  }

 private:
  const bool pinned_;
};

}  // namespace

c10::Allocator* device_allocator() {
  static PoolAllocator allocator(/*pinned=*/false);
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PoolAllocator allocator(/*pinned=*/true);
  return &allocator;
}

void record_use(const void* address, Queue& queue) {
  pool().with_block(address, [&](Block* block) {
    if (block == nullptr || block->owner == nullptr || block->owner == &queue) return;
    if (std::ranges::find(block->users, &queue) == block->users.end()) block->users.push_back(&queue);
  });
}

bool is_pinned(const void* address) {
  return pool().with_block(address,
                           [](const Block* block) { return block != nullptr && block->owner == nullptr && block->allocated; });
}

void record_pinned_use(const void* address, OpPtr copy) {
  if (copy->queue != nullptr && copy->queue->capture != nullptr) return;
  pool().with_block(address, [&](Block* block) { block->copies.push_back(std::move(copy)); });
}

bool is_mapped(const void* address, size_t bytes, c10::DeviceIndex device) {
  return pool().with_block(address, [&](const Block* block) {
    return block != nullptr && block->owner != nullptr && block->owner->device == device &&
           static_cast<const char*>(address) + bytes <= block->address + block->capacity;
  });
}

}  // namespace fake_cuda
