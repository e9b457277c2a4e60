#include "twin.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <random>
#include <regex>

#include "../../csrc/kernels.h"
#include "memory.h"

namespace fake_cuda {
namespace {

// wire, table, chunks, scale, two scratch pointers
constexpr size_t kParameters = 6;
constexpr size_t kFirstScratch = 4;
constexpr int64_t kChunkWords = 4;
constexpr int64_t kAddressWords = 2;

struct Form {
  bool packs;
  c10::ScalarType gradient;
  c10::ScalarType wire;
};

std::optional<Form> form_of(const std::string& kernel) {
  static const auto* dtypes = new std::map<std::string, c10::ScalarType>{
      {"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};
  static const std::regex pattern("fastddp_(pack|unpack)_([a-z0-9]+)_to_([a-z0-9]+)");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto source = dtypes->find(match[2]), target = dtypes->find(match[3]);
  if (source == dtypes->end() || target == dtypes->end()) return std::nullopt;
  const bool packs = match[1] == "pack";
  return Form{packs, packs ? source->second : target->second, packs ? target->second : source->second};
}

// Elements of one dtype from `address` on.
at::Tensor elements(void* address, int64_t count, c10::ScalarType dtype) {
  return at::from_blob(address, {count}, dtype);
}

// Both kernels do the same, in two directions: target = cast(source * scale); zeros where there is no source.
void move(const at::Tensor& source, const at::Tensor& target, double scale) {
  static auto* cpu = fastddp::make_cpu_kernels().release();
  cpu->pack({{source, target}}, scale);
}

// Row of the table of chunks.
struct Chunk {
  int64_t gradient;
  int64_t begin;
  int64_t start;
  int64_t count;
};

class Program {
 public:
  Program(const Launch& launch, const Form& form) : launch_(launch), form_(form) {}

  void run(const Chunk& chunk) const {
    const auto* row = checked(launch_.table + kAddressWords * chunk.gradient, kAddressWords);
    auto* gradient = reinterpret_cast<char*>(row[0]);
    auto* place = launch_.wire + chunk.start * size(form_.wire);
    const auto wire = elements(checked(place, chunk.count * size(form_.wire)), chunk.count, form_.wire);
    if (gradient == nullptr) {
      if (form_.packs) move(at::Tensor(), wire, launch_.scale);
    } else if (row[1] == 0) {
      auto* first = checked(gradient + chunk.begin * size(form_.gradient), chunk.count * size(form_.gradient));
      const auto flat = elements(first, chunk.count, form_.gradient);
      form_.packs ? move(flat, wire, launch_.scale) : move(wire, flat, launch_.scale);
    } else {
      run_strided(chunk, gradient, wire, launch_.table + row[1]);
    }
  }

 private:
  static int64_t size(c10::ScalarType dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype));
  }

  template <typename T>
  T* checked(T* address, int64_t count) const {
    const auto bytes = static_cast<size_t>(count) * sizeof(T);
    TORCH_CHECK(is_mapped(address, bytes, launch_.device), "illegal memory access: kernel ", launch_.kernel,
                " touches ", bytes, " bytes at ", static_cast<const void*>(address),
                ", which are not memory of device ", static_cast<int>(launch_.device));
    return address;
  }

  void run_strided(const Chunk& chunk, char* gradient, const at::Tensor& wire, const int64_t* shape) const {
    const auto dims = *checked(shape, 1);
    checked(shape, 1 + 2 * dims);
    const auto flat = at::empty({chunk.count}, form_.gradient);
    auto* packed = static_cast<char*>(flat.data_ptr());
    const auto bytes = size(form_.gradient);
    std::vector<char*> places;
    for (int64_t i = 0; i < chunk.count; ++i) {
      places.push_back(checked(gradient + offset(shape, dims, chunk.begin + i) * bytes, bytes));
    }
    if (form_.packs) {
      for (int64_t i = 0; i < chunk.count; ++i) std::memcpy(packed + i * bytes, places[i], bytes);
      move(flat, wire, launch_.scale);
    } else {
      move(wire, flat, launch_.scale);
      for (int64_t i = 0; i < chunk.count; ++i) std::memcpy(places[i], packed + i * bytes, bytes);
    }
  }

  // Where element `index` of the wire's order lies, in elements from the gradient's address.
  static int64_t offset(const int64_t* shape, int64_t dims, int64_t index) {
    int64_t offset = 0;
    for (int64_t dim = 0; dim < dims; ++dim) {
      const auto extent = shape[1 + 2 * dim], stride = shape[2 + 2 * dim];
      offset += (dim == dims - 1 ? index : index % extent) * stride;
      index /= extent;
    }
    return offset;
  }

  const Launch& launch_;
  const Form form_;
};

}  // namespace

bool has_twin(const Kernel& kernel) {
  return form_of(kernel.name).has_value();
}

std::optional<Launch> read_launch(const Kernel& kernel, const std::vector<uint64_t>& values, unsigned programs,
                                  c10::DeviceIndex device) {
  const auto is_word = [](const Parameter& parameter) { return parameter.size == sizeof(uint64_t); };
  if (values.size() != kParameters || !std::ranges::all_of(kernel.parameters, is_word)) return std::nullopt;
  if (std::any_of(values.begin() + kFirstScratch, values.end(), [](uint64_t value) { return value != 0; })) {
    return std::nullopt;
  }
  return Launch{kernel.name,
                reinterpret_cast<char*>(values[0]),
                reinterpret_cast<const int64_t*>(values[1]),
                reinterpret_cast<const int64_t*>(values[2]),
                std::bit_cast<double>(values[3]),
                programs,
                device};
}

std::string problem_with_pointers(const Launch& launch) {
  const size_t chunk_bytes = launch.programs * kChunkWords * sizeof(int64_t);
  if (!is_allocated(launch.wire, 1, launch.device)) return "the wire";
  if (!is_allocated(launch.table, kAddressWords * sizeof(int64_t), launch.device)) return "the table of addresses";
  if (!is_allocated(launch.chunks, chunk_bytes, launch.device)) return "the table of chunks";
  return "";
}

void execute(const Launch& launch, const std::string& problem) {
  TORCH_CHECK(problem.empty(), "illegal memory access: kernel ", launch.kernel, " was launched on device ",
              static_cast<int>(launch.device), " with a pointer to ", problem,
              " that was not in allocated memory there");
  std::vector<Chunk> chunks(launch.programs);
  std::memcpy(chunks.data(), launch.chunks, chunks.size() * sizeof(Chunk));
  static std::mt19937 random;
  std::ranges::shuffle(chunks, random);
  const Program program(launch, *form_of(launch.kernel));
  for (const auto& chunk : chunks) program.run(chunk);
}

}  // namespace fake_cuda
