#include "twin.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <regex>

#include "../../csrc/kernels.h"
#include "memory.h"

namespace fake_cuda {
namespace {

struct Types {
  bool packs;
  c10::ScalarType gradient;
  c10::ScalarType wire;
};

Types parse(const std::string& kernel) {
  static const std::map<std::string, c10::ScalarType> dtypes = {
      {"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};
  static const std::regex pattern("fastddp_(pack|unpack)_(\\w+)_to_(\\w+)");
  std::smatch match;
  TORCH_CHECK(std::regex_match(kernel, match, pattern) && dtypes.count(match[2]) == 1 && dtypes.count(match[3]) == 1,
              "the stand-in driver has no twin of kernel ", kernel);
  const bool packs = match[1] == "pack";
  const auto source = dtypes.at(match[2]), target = dtypes.at(match[3]);
  return {packs, packs ? source : target, packs ? target : source};
}

void check_memory(const void* address, size_t bytes, const Launch& launch) {
  TORCH_CHECK(is_memory(address, bytes, launch.device, /*live=*/false), "illegal memory access: kernel ", launch.kernel,
              " touches ", bytes, " bytes at ", address);
}

// Where the elements begin, ..., begin + count of a strided gradient are.
std::vector<char*> strided_elements(char* address, const int64_t* block, int64_t begin, int64_t count, size_t size) {
  std::vector<char*> elements;
  const auto dims = block[0];
  for (auto index = begin; index < begin + count; ++index) {
    auto remaining = index;
    int64_t offset = 0;
    for (int64_t dim = 0; dim < dims; ++dim) {
      const auto extent = block[1 + 2 * dim], stride = block[2 + 2 * dim];
      offset += (dim == dims - 1 ? remaining : remaining % extent) * stride;
      remaining /= extent;
    }
    elements.push_back(address + offset * static_cast<int64_t>(size));
  }
  return elements;
}

class Program {
 public:
  Program(const Launch& launch, const Types& types)
      : launch_(launch), types_(types), kernels_(fastddp::make_cpu_kernels()) {}

  void run(const int64_t* row) {
    const auto gradient = row[0], begin = row[1], start = row[2], count = row[3];
    const auto address = launch_.table[2 * gradient], shape = launch_.table[2 * gradient + 1];
    const auto size = c10::elementSize(types_.gradient);
    auto* place = launch_.wire + start * static_cast<int64_t>(c10::elementSize(types_.wire));
    check_memory(place, static_cast<size_t>(count) * c10::elementSize(types_.wire), launch_);
    const auto view = at::from_blob(place, {count}, types_.wire);
    auto* base = reinterpret_cast<char*>(address);
    if (base == nullptr) {
      if (types_.packs) kernels_->pack({{at::Tensor(), view}}, launch_.scale);
    } else if (shape == 0) {
      auto* first = base + begin * static_cast<int64_t>(size);
      check_memory(first, static_cast<size_t>(count) * size, launch_);
      move({at::from_blob(first, {count}, types_.gradient), view});
    } else {
      const auto* block = launch_.table + shape;
      check_memory(block, sizeof(int64_t), launch_);
      check_memory(block, static_cast<size_t>(1 + 2 * block[0]) * sizeof(int64_t), launch_);
      move_strided(strided_elements(base, block, begin, count, size), view);
    }
  }

 private:
  void move(const fastddp::Slot& slot) {
    if (types_.packs) {
      kernels_->pack({slot}, launch_.scale);
    } else {
      TORCH_CHECK(launch_.scale == 1.0, "unpack with a scale has no twin");
      kernels_->unpack({slot});
    }
  }

  void move_strided(const std::vector<char*>& elements, const at::Tensor& view) {
    const auto size = c10::elementSize(types_.gradient);
    const auto flat = at::empty({static_cast<int64_t>(elements.size())}, types_.gradient);
    auto* values = static_cast<char*>(flat.data_ptr());
    for (auto* element : elements) check_memory(element, size, launch_);
    for (size_t i = 0; i < elements.size() && types_.packs; ++i) std::memcpy(values + i * size, elements[i], size);
    move({flat, view});
    for (size_t i = 0; i < elements.size() && !types_.packs; ++i) std::memcpy(elements[i], values + i * size, size);
  }

  const Launch& launch_;
  const Types types_;
  std::unique_ptr<fastddp::Kernels> kernels_;
};

}  // namespace

void check_name(const std::string& kernel) {
  parse(kernel);
}

void execute(const Launch& launch) {
  constexpr size_t chunk_words = 4;
  check_memory(launch.chunks, launch.programs * chunk_words * sizeof(int64_t), launch);
  std::vector<unsigned> order(launch.programs);
  std::iota(order.begin(), order.end(), 0);
  static std::mt19937 shuffle;
  std::ranges::shuffle(order, shuffle);
  Program program(launch, parse(launch.kernel));
  for (const auto index : order) program.run(launch.chunks + index * chunk_words);
}

}  // namespace fake_cuda
