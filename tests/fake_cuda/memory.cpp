
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

#include "device.h"

namespace fake_cuda {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xFF;

size_t rounded_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// As torch's allocator for CUDA: requests of up to 1 MiB share segments of 2 MiB, those of up to 10 MiB segments of 20 MiB.
constexpr size_t kMiB = 1 << 20;
bool is_small(size_t bytes) {
  return bytes <= kMiB;
}
size_t segment_for(size_t bytes) {
  if (is_small(bytes)) return 2 * kMiB;
  return bytes < 10 * kMiB ? 20 * kMiB : rounded_up(bytes, 2 * kMiB);
}
bool splits(bool small, size_t remaining) {
  return small ? remaining >= kAlignment : remaining > kMiB;
}

// A part of a segment; the parts that follow each other know each other.
struct Block {
  char* address;
  size_t capacity;
  size_t size;            // what was asked for
  Queue* owner;           // null: pinned
  const Graph* graph;     // the capture that it was made in
  bool small = true;      // of segments for small requests
  bool allocated = true;  // and not freed
  char* fresh = address;  // nobody has had what lies from here on
  Block *before = nullptr, *after = nullptr;
  std::vector<Queue*> users{};      // streams other than the owner
  std::vector<OpPtr> copies{};      // of pinned memory
  std::vector<OpPtr> free_after{};  // freed; reusable when these are done

  bool is_reusable() const {
    return std::ranges::all_of(free_after, [](const OpPtr& op) { return op->done.load(); });
  }
  char* end() const { return address + capacity; }
  Work overwrite() const {
    return {"overwrite freed memory", [to = address, bytes = capacity] { std::memset(to, kPoison, bytes); }};
  }
};

// The smallest that fits is taken, of several the one with the lowest address: so a step that repeats comes to use the same memory.
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->capacity, a->address) < std::tie(b->capacity, b->address);
  }
};

class Pool {
 public:
  // `owner` null: pinned memory.
  char* allocate(size_t bytes, Queue* owner) {
    const std::lock_guard lock(mutex_);
    auto* block = owner == nullptr ? take_pinned(bytes) : take(bytes, owner);
    block->size = bytes;
    block->allocated = true;
    block->free_after.clear();
    if (block->fresh < block->end()) std::memset(block->fresh, kPoison, static_cast<size_t>(block->end() - block->fresh));
    block->fresh = std::max(block->fresh, block->end());
    if (owner != nullptr) peak_bytes = std::max<size_t>(peak_bytes, allocated_bytes += rounded_up(bytes, kAlignment));
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
  Block& make(size_t capacity, Queue* owner, const Graph* graph) {
    auto* address = static_cast<char*>(std::aligned_alloc(kAlignment, capacity));
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "no memory for ", capacity, " bytes");
    return blocks_.emplace(address, Block{address, capacity, capacity, owner, graph}).first->second;
  }

  Block* take_pinned(size_t bytes) {
    const auto capacity = std::bit_ceil(std::max(bytes, kAlignment));
    auto& freed = freed_pinned_[capacity];
    const auto reusable = std::ranges::find_if(freed, [](const auto& entry) { return entry.second->is_reusable(); });
    if (reusable == freed.end()) {
      check_no_capture("memory is pinned");
      return &make(capacity, nullptr, nullptr);
    }
    auto* block = reusable->second;
    freed.erase(reusable);
    return block;
  }

  Block* take(size_t bytes, Queue* owner) {
    std::erase_if(waiting_, [&](Block* block) { return block->is_reusable() && (give_back(*block), true); });
    const auto capacity = std::max(rounded_up(bytes, kAlignment), kAlignment);
    auto& freed = freed_[{owner, owner->capture, is_small(capacity)}];
    Block wanted{nullptr, capacity, bytes, owner, owner->capture};
    const auto found = freed.lower_bound(&wanted);
    Block* block = nullptr;
    if (found != freed.end()) {
      block = *found;
      freed.erase(found);
    } else {
      block = &make(segment_for(capacity), owner, owner->capture);
      block->small = is_small(capacity);
    }
    if (!splits(block->small, block->capacity - capacity)) return block;
    auto* address = block->address + capacity;
    auto& rest = blocks_.emplace(address, *block).first->second;
    rest.address = address;
    rest.fresh = std::max(block->fresh, address);
    rest.capacity = block->capacity - capacity;
    rest.allocated = false;
    rest.before = block;
    if (rest.after != nullptr) rest.after->before = &rest;
    block->after = &rest;
    block->capacity = capacity;
    freed.insert(&rest);
    return block;
  }

  // To the free blocks of its stream, together with free neighbours.
  void give_back(Block& block) {
    auto& freed = freed_[{block.owner, block.graph, block.small}];
    auto* whole = &block;
    if (block.before != nullptr && freed.erase(block.before) > 0) whole = &joined(*block.before, block);
    if (whole->after != nullptr && freed.erase(whole->after) > 0) joined(*whole, *whole->after);
    freed.insert(whole);
  }

  Block& joined(Block& first, Block& second) {
    first.fresh = second.fresh;
    first.capacity += second.capacity;
    first.after = second.after;
    if (first.after != nullptr) first.after->before = &first;
    blocks_.erase(second.address);
    return first;
  }

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
    freed_pinned_[block.capacity].emplace(block.address, &block);
  }

  void free_on_device(Block& block) {
    auto& simulator = Simulator::get();
    allocated_bytes -= rounded_up(block.size, kAlignment);
    const auto users = std::exchange(block.users, {});
    const bool captured = block.owner->capture != nullptr;
    if (block.graph != block.owner->capture) return;  // a graph's memory stays its own: a replay writes it
    if (captured && !users.empty()) return;           // nobody knows when they are done: not reused at all
    auto overwrite = block.overwrite();
    if (users.empty()) {
      simulator.enqueue(*block.owner, std::move(overwrite));
      return give_back(block);
    }
    for (const auto* user : users) overwrite.after.push_back(simulator.last(*user));
    overwrite.after.push_back(simulator.last(*block.owner));
    block.free_after = {simulator.enqueue_anywhere(std::move(overwrite))};
    waiting_.push_back(&block);
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::map<std::tuple<Queue*, const Graph*, bool>, std::set<Block*, BySize>> freed_;
  std::vector<Block*> waiting_;  // freed, while streams other than the owner may use them
  std::map<size_t, std::map<char*, Block*>> freed_pinned_;
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
    if (block == nullptr || block->owner == nullptr || block->owner->device != device) return false;
    while (block->after != nullptr && static_cast<const char*>(address) + bytes > block->end()) block = block->after;
    return static_cast<const char*>(address) + bytes <= block->end();
  });
}

}  // namespace fake_cuda
