// pack, unpack and measure: kernels/pack_kernels.py, computed by fastddp's kernels for the CPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <map>
#include <regex>

#include "pack/kernels.h"
#include "twin.h"

namespace fake_cuda {
namespace {

constexpr int64_t kChunkWords = 4;
constexpr int64_t kAddressWords = 2;
constexpr int64_t kMeasuredAtOnce = 4096;
constexpr uintptr_t kAccessBytes = 16;

std::atomic<size_t> by_element{0};

enum Argument : size_t { kWire, kTable, kChunks, kScale, kPartials };

struct Form {
  bool packs;
  bool measures;
  c10::ScalarType gradient;
  c10::ScalarType wire;
};

c10::ScalarType dtype_of(const std::string& name) {
  static const auto* dtypes = new std::map<std::string, c10::ScalarType>{
      {"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};
  const auto found = dtypes->find(name);
  return found == dtypes->end() ? c10::ScalarType::Undefined : found->second;
}

std::optional<Form> form_of(const std::string& kernel) {
  static const std::regex pattern("fastddp_(pack|pack_measuring|unpack)_([a-z0-9]+)_to_([a-z0-9]+)");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto source = dtype_of(match[2]), target = dtype_of(match[3]);
  const bool packs = match[1] != "unpack";
  return Form{packs, match[1] != "pack", packs ? source : target, packs ? target : source};
}

fastddp::Kernels& on_the_cpu() {
  static auto* cpu = fastddp::make_cpu_kernels().release();
  return *cpu;
}

// Elements of one dtype from `address` on.
at::Tensor elements(void* address, int64_t count, c10::ScalarType dtype) {
  return at::from_blob(address, {count}, dtype);
}

// Both kernels do the same, in two directions: target = cast(source * scale); zeros where there is no source.
void move(const at::Tensor& source, const at::Tensor& target, double scale) {
  on_the_cpu().pack({{source, target}}, scale);
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
  Program(const Launch& launch, const Form& form, int64_t number) : launch_(launch), form_(form), number_(number) {}

  void run() const {
    const auto chunk = reinterpret_cast<const Chunk*>(launch_.pointer<const int64_t>(kChunks))[number_];
    const auto* table = launch_.pointer<const int64_t>(kTable);
    const auto* row = launch_.checked(table + kAddressWords * chunk.gradient, kAddressWords);
    auto* gradient = reinterpret_cast<char*>(row[0]);
    auto* place = launch_.pointer<char>(kWire) + chunk.start * size(form_.wire);
    const auto wire = elements(launch_.checked(place, chunk.count * size(form_.wire)), chunk.count, form_.wire);
    if (gradient == nullptr) {
      if (form_.packs) move(at::Tensor(), wire, scale());
      store_measured(at::empty({0}));
    } else if (row[1] == 0) {
      auto* first = launch_.checked(gradient + chunk.begin * size(form_.gradient), chunk.count * size(form_.gradient));
      const auto both = reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(place);
      if (both % kAccessBytes != 0) ++by_element;
      const auto flat = elements(first, chunk.count, form_.gradient);
      if (form_.packs) store_measured(flat);  // before what lives in the wire is scaled there
      form_.packs ? move(flat, wire, scale()) : move(wire, flat, scale());
      if (!form_.packs) store_measured(flat);
    } else {
      run_strided(chunk, gradient, wire, table + row[1]);
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

 private:
  static int64_t size(c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

  double scale() const { return launch_.real(kScale); }

  void store_measured(const at::Tensor& written) const {
    if (!form_.measures || launch_.pointer<double>(kPartials) == nullptr) return;
    auto* place = launch_.checked(launch_.pointer<double>(kPartials) + 2 * number_, 2);
    at::from_blob(place, {2}, at::kDouble).copy_(fastddp::add_up(on_the_cpu().measure(written)));
  }

  void run_strided(const Chunk& chunk, char* gradient, const at::Tensor& wire, const int64_t* shape) const {
    const auto dims = *launch_.checked(shape, 1);
    launch_.checked(shape, 1 + 2 * dims);
    const auto flat = at::empty({chunk.count}, form_.gradient);
    auto* packed = static_cast<char*>(flat.data_ptr());
    const auto bytes = size(form_.gradient);
    std::vector<char*> places;
    for (int64_t i = 0; i < chunk.count; ++i) {
      places.push_back(launch_.checked(gradient + offset(shape, dims, chunk.begin + i) * bytes, bytes));
    }
    if (form_.packs) {
      for (int64_t i = 0; i < chunk.count; ++i) std::memcpy(packed + i * bytes, places[i], bytes);
      move(flat, wire, scale());
    } else {
      move(wire, flat, scale());
      for (int64_t i = 0; i < chunk.count; ++i) std::memcpy(places[i], packed + i * bytes, bytes);
    }
    store_measured(flat);
  }

  const Launch& launch_;
  const Form form_;
  const int64_t number_;
};

std::vector<Named> memory_of_moves(const Launch& launch) {
  std::vector<Named> memory{
      {"the wire", launch.pointer<void>(kWire), 1},
      {"the table of addresses", launch.pointer<void>(kTable), kAddressWords * sizeof(int64_t)},
      {"the table of chunks", launch.pointer<void>(kChunks), launch.programs * kChunkWords * sizeof(int64_t)}};
  if (launch.values.size() > kPartials && launch.pointer<void>(kPartials) != nullptr) {
    memory.push_back({"partial results", launch.pointer<void>(kPartials), launch.programs * 2 * sizeof(double)});
  }
  return memory;
}

// Of gradients that lie in any way: offset() says where.
std::optional<Twin> measure_gradients_twin(const std::string& kernel) {
  static const std::string prefix = "fastddp_measure_gradients_";
  if (!kernel.starts_with(prefix)) return std::nullopt;
  const auto dtype = dtype_of(kernel.substr(prefix.size()));
  const auto memory = [](const Launch& launch) {
    return std::vector<Named>{
        {"the table of addresses", launch.pointer<void>(0), kAddressWords * sizeof(int64_t)},
        {"the table of chunks", launch.pointer<void>(1), launch.programs * kChunkWords * sizeof(int64_t)},
        {"partial results", launch.pointer<void>(2), launch.programs * 2 * sizeof(double)}};
  };
  const auto run = [dtype](const Launch& launch, int64_t program) {
    const auto chunk = reinterpret_cast<const Chunk*>(launch.pointer<const int64_t>(1))[program];
    const auto* table = launch.pointer<const int64_t>(0);
    const auto* row = launch.checked(table + kAddressWords * chunk.gradient, kAddressWords);
    auto* gradient = reinterpret_cast<char*>(row[0]);
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
    const auto values = at::empty({chunk.count}, dtype);
    auto* next = static_cast<char*>(values.data_ptr());
    for (int64_t i = 0; i < chunk.count; ++i, next += bytes) {
      const auto* shape = table + row[1];
      const auto place = row[1] == 0 ? chunk.begin + i : Program::offset(shape, shape[0], chunk.begin + i);
      std::memcpy(next, launch.checked(gradient + place * bytes, bytes), bytes);
    }
    const auto measured = fastddp::add_up(on_the_cpu().measure(values));
    at::from_blob(launch.pointer<double>(2) + 2 * program, {2}, at::kDouble).copy_(measured);
  };
  return Twin{3, memory, run};
}

std::optional<Twin> measure_twin(const std::string& kernel) {
  static const std::string prefix = "fastddp_measure_";
  if (!kernel.starts_with(prefix)) return std::nullopt;
  const auto dtype = dtype_of(kernel.substr(prefix.size()));
  const auto memory = [](const Launch& launch) {
    return std::vector<Named>{{"the wire", launch.pointer<void>(0), 1},
                              {"partial results", launch.pointer<void>(2), launch.programs * 2 * sizeof(double)}};
  };
  const auto run = [dtype](const Launch& launch, int64_t program) {
    const auto begin = program * kMeasuredAtOnce, count = std::min(kMeasuredAtOnce, launch.integer(1) - begin);
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    auto* first = launch.checked(launch.pointer<char>(0) + begin * size, count * size);
    const auto measured = fastddp::add_up(on_the_cpu().measure(elements(first, count, dtype)));
    at::from_blob(launch.pointer<double>(2) + 2 * program, {2}, at::kDouble).copy_(measured);
  };
  return Twin{3, memory, run};
}

}  // namespace

size_t chunks_by_element() {
  return by_element;
}

std::optional<Twin> pack_twin(const std::string& kernel) {
  const auto form = form_of(kernel);
  if (!form.has_value()) {
    const auto of_gradients = measure_gradients_twin(kernel);
    return of_gradients.has_value() ? of_gradients : measure_twin(kernel);
  }
  const auto run = [form](const Launch& launch, int64_t program) { Program(launch, *form, program).run(); };
  return Twin{form->measures ? size_t{5} : size_t{4}, memory_of_moves, run};
}

}  // namespace fake_cuda
