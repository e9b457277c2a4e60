// pack, unpack, measure, sum_shards and write_words: kernels/pack_kernels.py, sum_shards_kernels.py and
// device_table_kernels.py, computed by fastddp's kernels for
// the CPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <regex>

#include "pack/kernels.h"
#include "twin.h"

namespace fake_cuda {
namespace {

constexpr int64_t kElements = 4096;  // of one program that knows no table of chunks

// Rows of the tables.
struct Address {
  char* gradient;
  int64_t shape;  // where in the table the shape is, in words; 0: the elements lie one after another
};
struct Chunk {
  int64_t gradient;
  int64_t begin;
  int64_t start;
  int64_t count;
};

fastddp::Kernels& on_the_cpu() {
  static auto* cpu = fastddp::make_cpu_kernels().release();
  return *cpu;
}

at::Tensor measured(const at::Tensor& values) {
  return fastddp::add_up(on_the_cpu().measure(values));
}

// Both kernels do the same, in two directions: target = cast(source * scale); zeros where there is no source.
void move(const at::Tensor& source, const at::Tensor& target, double scale) {
  on_the_cpu().pack({{source, target}}, scale);
}

// The elements of a gradient that belong to a chunk.
class Elements {
 public:
  Elements(const Launch& launch, size_t table, const Chunk& chunk, c10::ScalarType dtype) {
    const auto& [gradient, shape] = launch.row<Address>(table, chunk.gradient);
    if (gradient == nullptr) return;
    const auto size = size_of(dtype);
    if (shape == 0) {
      memory_ = launch.elements(gradient + chunk.begin * size, chunk.count, dtype);
      return;
    }
    const auto* words = launch.pointer<const int64_t>(table) + shape;
    launch.check(words, 8);
    launch.check(words, 8 * (1 + 2 * words[0]));
    places_ = at::empty({chunk.count}, at::kLong);
    auto* places = places_.data_ptr<int64_t>();
    for (int64_t i = 0; i < chunk.count; ++i) places[i] = place(words, chunk.begin + i);
    memory_ = launch.elements(gradient, *std::max_element(places, places + chunk.count) + 1, dtype);
  }

  bool exist() const { return memory_.defined(); }
  const void* address() const { return memory_.const_data_ptr(); }
  bool lie_together() const { return !places_.defined(); }
  at::Tensor read() const { return lie_together() ? memory_ : memory_.index_select(0, places_); }
  void write(const at::Tensor& values) const {
    lie_together() ? memory_.copy_(values) : memory_.index_copy_(0, places_, values);
  }

 private:
  // Where element `index` of the wire's order lies, in elements from the gradient's address.
  static int64_t place(const int64_t* shape, int64_t index) {
    int64_t place = 0;
    for (int64_t dim = 0; dim < shape[0]; ++dim) {
      const auto extent = shape[1 + 2 * dim], stride = shape[2 + 2 * dim];
      place += (dim == shape[0] - 1 ? index : index % extent) * stride;
      index /= extent;
    }
    return place;
  }

  at::Tensor memory_, places_;
};

enum Argument : size_t { kWire, kTable, kChunks, kScale, kPartials };

void pack_or_unpack(const Launch& launch, int64_t program, bool packs, bool measures, c10::ScalarType gradient_dtype,
                    c10::ScalarType wire_dtype) {
  constexpr uintptr_t access_bytes = 16;
  const auto& chunk = launch.row<Chunk>(kChunks, program);
  const Elements gradient(launch, kTable, chunk, gradient_dtype);
  auto* place = launch.pointer<char>(kWire) + chunk.start * size_of(wire_dtype);
  const auto wire = launch.elements(place, chunk.count, wire_dtype);
  if (gradient.exist() && gradient.lie_together()) {
    const auto both = reinterpret_cast<uintptr_t>(gradient.address()) | reinterpret_cast<uintptr_t>(place);
    if (both % access_bytes != 0) ++chunks_by_element;
  }
  auto values = gradient.exist() ? gradient.read() : at::Tensor();
  if (!packs && gradient.exist()) {
    values = at::empty({chunk.count}, gradient_dtype);
    move(wire, values, launch.real(kScale));
    gradient.write(values);
  }
  if (measures && launch.pointer<double>(kPartials) != nullptr) {  // before what lives in the wire is scaled there
    launch.pair(kPartials, program).copy_(measured(values.defined() ? values : at::empty({0})));
  }
  if (packs) move(values, wire, launch.real(kScale));
}

at::Tensor chunk_of_gradient(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  return Elements(launch, 0, launch.row<Chunk>(1, program), dtype).read();
}

at::Tensor chunk_of_wire(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto first = program * kElements, count = std::min(kElements, launch.integer(1) - first);
  return launch.elements(launch.pointer<char>(0) + first * size_of(dtype), count, dtype);
}

// Adds up in fp32, in the order of the ranks.
void sum_shards(const Launch& launch, int64_t program, c10::ScalarType dtype) {
  const auto size = size_of(dtype);
  const auto ranks = launch.integer(1), elements = launch.integer(2);
  const auto first = program * kElements, count = std::min(kElements, elements - first);
  auto sum = at::zeros({count}, at::kFloat);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sum += launch.elements(launch.pointer<char>(0) + (rank * elements + first) * size, count, dtype);
  }
  launch.elements(launch.pointer<char>(3) + first * size, count, dtype).copy_(sum);
}

}  // namespace

std::optional<Twin> pack_twin(const std::string& kernel) {
  if (kernel == "fastddp_write_words") {
    static constexpr size_t words = 256, group = 32;
    return Twin{2 + words, [](const Launch& launch, int64_t) {
                  const auto count = std::min(words, (launch.values.at(1) + group - 1) / group * group);
                  launch.check(launch.pointer<char>(0), static_cast<int64_t>(count * sizeof(int64_t)));
                  std::copy_n(launch.values.begin() + 2, count, launch.pointer<uint64_t>(0));
                }};
  }
  static const std::regex moves("fastddp_(pack|pack_measuring|unpack)_([a-z0-9]+)_to_([a-z0-9]+)");
  static const std::regex others("fastddp_(measure|measure_gradients|sum_shards)_(fp32|fp16|bf16|fp64)");
  std::smatch match;
  if (std::regex_match(kernel, match, moves)) {
    const bool packs = match[1] != "unpack", measures = match[1] != "pack";
    const auto source = dtype_of(match[2]), target = dtype_of(match[3]);
    return Twin{measures ? size_t{5} : size_t{4}, [=](const Launch& launch, int64_t program) {
                  pack_or_unpack(launch, program, packs, measures, packs ? source : target, packs ? target : source);
                }};
  }
  if (!std::regex_match(kernel, match, others)) return std::nullopt;
  const auto dtype = dtype_of(match[2]);
  if (match[1] == "sum_shards") {
    return Twin{4, [=](const Launch& launch, int64_t program) { sum_shards(launch, program, dtype); }};
  }
  const bool of_gradients = match[1] == "measure_gradients";
  return Twin{
      3, [=](const Launch& launch, int64_t program) {
        launch.pair(2, program)
            .copy_(measured(of_gradients ? chunk_of_gradient(launch, program, dtype) : chunk_of_wire(launch, program, dtype)));
      }};
}

}  // namespace fake_cuda
