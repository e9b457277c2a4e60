// A transfer as the GPU sees it: a few multiprocessors busy for so long, reading and writing the wire as time goes by.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "emulated_wire.h"

namespace emulated_wire {
namespace {

// As many as one of NCCL's channels has at most.
constexpr int kThreads = 512;
constexpr int kVectorBytes = 16;
constexpr int kVectorsInFlight = 4;

__device__ std::uint64_t now() {
  std::uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__device__ void wait_until(std::uint64_t moment) {
  while (now() < moment) __nanosleep(100);
}

// 16 bits are multiplied in fp32 too.
template <typename T>
__device__ T times(T value, double factor) {
  return value * static_cast<T>(factor);
}
template <>
__device__ __half times(__half value, double factor) {
  return __float2half_rn(__half2float(value) * static_cast<float>(factor));
}
template <>
__device__ __nv_bfloat16 times(__nv_bfloat16 value, double factor) {
  return __float2bfloat16_rn(__bfloat162float(value) * static_cast<float>(factor));
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T element[kWidth];
};

template <typename T, int kWidth>
__device__ void multiply(Vector<T, kWidth>& vector, double factor) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) vector.element[i] = times(vector.element[i], factor);
}

// The grid takes tile after tile: kVectorsInFlight vectors a thread, neighbouring threads on neighbouring vectors. Before
// each it waits for the moment at which a wire of constant speed would have got there.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    transfer(std::uint64_t nanoseconds, T* data, std::int64_t count, double factor) {
  const auto start = now();
  auto* vectors = reinterpret_cast<Vector<T, kWidth>*>(data);
  const std::int64_t whole = count / kWidth;
  const std::int64_t tile = static_cast<std::int64_t>(kThreads) * kVectorsInFlight;
  for (std::int64_t begin = blockIdx.x * tile; begin < whole; begin += gridDim.x * tile) {
    const double share = static_cast<double>(begin) / static_cast<double>(whole);
    wait_until(start + static_cast<std::uint64_t>(share * static_cast<double>(nanoseconds)));
    Vector<T, kWidth> held[kVectorsInFlight];
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) {
      const std::int64_t at = begin + i * kThreads + threadIdx.x;
      if (at < whole) held[i] = vectors[at];
    }
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) {
      const std::int64_t at = begin + i * kThreads + threadIdx.x;
      if (at >= whole) continue;
      multiply(held[i], factor);
      vectors[at] = held[i];
    }
  }
  const std::int64_t rest = whole * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && rest < count) data[rest] = times(data[rest], factor);
  wait_until(start + nanoseconds);
}

__global__ void __launch_bounds__(kThreads) pause(std::uint64_t nanoseconds) {
  wait_until(now() + nanoseconds);
}

template <typename T>
void launch(cudaStream_t stream, int blocks, std::uint64_t nanoseconds, void* data, std::int64_t count, double factor) {
  constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
  auto* elements = static_cast<T*>(data);
  if (reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0) {
    transfer<T, kWidth><<<blocks, kThreads, 0, stream>>>(nanoseconds, elements, count, factor);
  } else {
    transfer<T, 1><<<blocks, kThreads, 0, stream>>>(nanoseconds, elements, count, factor);
  }
}

}  // namespace

int launch_transfer(void* native_stream, int blocks, std::uint64_t nanoseconds, void* data, std::int64_t count,
                    Element element, double factor) {
  auto* stream = static_cast<cudaStream_t>(native_stream);
  switch (element) {
    case Element::none:
      pause<<<blocks, kThreads, 0, stream>>>(nanoseconds);
      break;
    case Element::float16:
      launch<__half>(stream, blocks, nanoseconds, data, count, factor);
      break;
    case Element::bfloat16:
      launch<__nv_bfloat16>(stream, blocks, nanoseconds, data, count, factor);
      break;
    case Element::float32:
      launch<float>(stream, blocks, nanoseconds, data, count, factor);
      break;
  }
  return cudaGetLastError();
}

}  // namespace emulated_wire
