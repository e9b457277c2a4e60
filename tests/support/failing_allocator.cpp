// An allocator of the CPU that fails when it is told to: failing_allocator.py.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>

namespace {

std::atomic<int> left{-1};  // allocations until one fails; less than 0: none does

class FailingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes == 0 || left < 0 || left-- != 0, "not enough memory: an allocation of ", bytes,
                     " bytes fails, as was asked for");
    return usual->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return usual->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { usual->copy_data(to, from, bytes); }

  c10::Allocator* const usual = c10::GetCPUAllocator();
};

}  // namespace

// The next allocation but `allocations` fails, once.
extern "C" void fail_after(int allocations) {
  static auto* const failing = [] {
    auto* const made = new FailingAllocator;
    c10::SetCPUAllocator(made, /*priority=*/100);
    return made;
  }();
  (void)failing;
  left = allocations;
}

extern "C" bool has_failed() {
  return left < 0;
}
