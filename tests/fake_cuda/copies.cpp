#include "copies.h"

#include <c10/core/DeviceGuard.h>

#include "host_view.h"
#include "memory.h"

namespace fake_cuda {
namespace {

std::atomic<size_t> upload_count, upload_bytes;

std::function<void()> copying(const at::Tensor& to, const at::Tensor& from) {
  return [to, from] { to.copy_(from); };
}

// Whether the bytes can go over as they lie; else torch makes a copy on the host first.
bool can_go_directly(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.strides() == from.strides() &&
         to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

bool is_pinned(const at::Tensor& tensor) {
  return fake_cuda::is_pinned(tensor.const_data_ptr());
}

// Pageable memory is read before the call returns, pinned memory when the copy runs.
void upload(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  constexpr auto what = "a blocking copy to the device";
  auto& simulator = Simulator::get();
  auto& queue = current_queue(destination.device().index());
  const bool pinned = is_pinned(source) && can_go_directly(destination, source);
  TORCH_CHECK(queue.capture == nullptr || pinned,
              "cudaErrorStreamCaptureUnsupported: a copy from pageable memory during a capture");
  if (!non_blocking) simulator.check_wait(what);
  ++upload_count;
  upload_bytes += destination.nbytes();
  const auto from = pinned ? host_view(source) : source.detach().clone();
  const auto op = simulator.enqueue(queue, {"upload", copying(host_view(destination), from)});
  if (pinned) record_pinned_use(source.const_data_ptr(), op);
  if (!non_blocking) simulator.wait_for(op, what);
}

// What must not happen raises before anything is enqueued: a caller who got an exception may free the destination.
void download(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  constexpr auto what = "a copy to the host";
  auto& simulator = Simulator::get();
  auto& queue = current_queue(source.device().index());
  const bool asynchronous = non_blocking && is_pinned(destination);
  if (!asynchronous) simulator.check_wait(what);
  const auto op = simulator.enqueue(queue, {"download", copying(host_view(destination), host_view(source))});
  if (is_pinned(destination)) record_pinned_use(destination.const_data_ptr(), op);
  if (!asynchronous) simulator.wait_for(op, what);
}

// Between devices, torch copies on the source's stream, and orders it with the destination's on both sides.
void copy_on_device(const at::Tensor& destination, const at::Tensor& source) {
  auto& simulator = Simulator::get();
  auto& to = current_queue(destination.device().index());
  auto& from = current_queue(source.device().index());
  Work work{"copy", copying(host_view(destination), host_view(source))};
  if (&to != &from) work.after.push_back(simulator.last(to));
  const auto op = simulator.enqueue(from, std::move(work));
  if (&to != &from) simulator.enqueue(to, {.name = "wait", .body = {}, .after = {op}});
}

}  // namespace

void copy(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  if (destination.numel() == 0 || destination.is_same(source)) return;
  const auto expanded = source.expand_as(destination);
  if (!on_device(source)) {
    upload(destination, expanded, non_blocking);
  } else if (!on_device(destination)) {
    download(destination, expanded, non_blocking);
  } else {
    copy_on_device(destination, expanded);
  }
}

size_t uploads() {
  return upload_count;
}

size_t uploaded_bytes() {
  return upload_bytes;
}

void reset_uploads() {
  upload_count = upload_bytes = 0;
}

}  // namespace fake_cuda
