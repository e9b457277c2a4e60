#include <ATen/ops/tensor.h>

#include <algorithm>

#include "audit/digests.h"
#include "bindings/bindings.h"
#include "block8/tables.h"
#include "device/launcher.h"
#include "low_rank/tables.h"
#include "pack/address_table.h"
#include "transport/sum_shards.h"

namespace fastddp {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;
using Tensors = std::vector<at::Tensor>;

std::vector<Slot> slots(const OptionalTensors& gradients, const Tensors& views) {
  TORCH_CHECK_VALUE(gradients.size() == views.size(), "fastddp: ", gradients.size(), " gradients for ", views.size(), " views");
  std::vector<Slot> result;
  for (size_t i = 0; i < views.size(); ++i) {
    TORCH_CHECK_VALUE(!gradients[i] || gradients[i]->sizes() == views[i].sizes(), "fastddp: gradient ", i, " has the shape ",
                      gradients[i]->sizes(), ", but its view of the wire ", views[i].sizes());
    result.push_back({gradients[i].value_or(at::Tensor()), views[i], i});
  }
  return result;
}

LocalSums sums_of(const Tensors& views) {
  std::vector<size_t> lengths;
  for (const auto& view : views) lengths.push_back(view.numel() * (view.is_complex() ? 2 : 1));
  return {lengths, std::make_shared<MeasuredRows>(views.at(0).device())};
}

std::vector<std::pair<double, int64_t>> pairs(const LocalSums& sums) {
  std::vector<std::pair<double, int64_t>> result;
  for (const auto& [sum_of_squares, not_finite] : sums.read(sums.rows()->on_host()))
    result.emplace_back(sum_of_squares, not_finite);
  return result;
}

// The tables, `left` being the numbers of the slots that operators do; then the dtypes of gradients and wire, unless no element
// remains for a kernel.
std::tuple<std::map<std::string, Words>, std::optional<c10::ScalarType>, std::optional<c10::ScalarType>> pack_tables(
    const OptionalTensors& gradients, const Tensors& views, int64_t chunk_elements, bool writable) {
  const TableWords words(slots(gradients, views), writable);
  Words left;
  for (const auto& slot : words.rest()) left.push_back(static_cast<int64_t>(slot.member));
  if (words.empty()) return {{{"left", left}}, std::nullopt, std::nullopt};
  return {{{"left", left},
           {"wire", {reinterpret_cast<int64_t>(words.wire())}},
           {"addresses", words.addresses()},
           {"chunks", words.chunks(chunk_elements)}},
          words.gradient_dtype(),
          words.wire_dtype()};
}

using GivenMatrix = std::tuple<OptionalTensor, OptionalTensor, at::Tensor, at::Tensor>;  // gradient, memory, p, q

// `before`: by matrix; without: the memory.
std::vector<LowRankMatrix> low_rank_matrices(const std::vector<GivenMatrix>& given, const OptionalTensors& before = {}) {
  std::vector<LowRankMatrix> result;
  for (const auto& [gradient, memory, p, q] : given) {
    const auto none = at::Tensor();
    const auto earlier = before.empty() ? memory : before.at(result.size());
    result.push_back({gradient.value_or(none), memory.value_or(none), p, q, earlier.value_or(none)});
  }
  return result;
}

std::vector<Basis> numbered(const std::vector<at::Tensor>& vectors) {
  std::vector<Basis> bases;
  for (const auto& basis : vectors) bases.push_back({basis, bases.size()});
  return bases;
}

using Blocked = std::vector<std::pair<at::Tensor, int64_t>>;  // gradient, first block

std::vector<BlockedGradient> blocked(const Blocked& given) {
  std::vector<BlockedGradient> gradients;
  for (const auto& [gradient, first_block] : given) gradients.push_back({gradient, first_block});
  return gradients;
}

// What an object's launcher says; 0 where it has none.
template <typename Result>
auto of_launcher(Result (Launcher::*method)() const) {
  return [method](const CallsKernels& kernels) {
    const auto* launcher = kernels.launcher();
    return launcher == nullptr ? Result() : (launcher->*method)();
  };
}

Purpose purpose(bool trial) {
  return trial ? Purpose::trial : Purpose::training;
}

Rounding rounding(std::optional<uint64_t> key) {
  return key ? Rounding(Dice{*key}) : std::nullopt;
}

}  // namespace

Block8 block8_of(const std::string& number, int64_t block) {
  const auto found = std::ranges::find(Block8::kNames, number);
  TORCH_CHECK_VALUE(found != Block8::kNames.end(), "fastddp: there are int8, e4m3 and e5m2, and no ", number);
  TORCH_CHECK_VALUE(block == 128 || block == 256, "fastddp: a block has 128 or 256 elements, not ", block);
  return {Block8::Number(found - Block8::kNames.begin()), block};
}

void bind_kernels(py::module_& m) {
  py::class_<Digests>(m, "Digests", "Of the bits of tensors; csrc/audit/digests.h.")
      .def(py::init<>())
      .def(
          "of",
          [](Digests& digests, const std::vector<std::tuple<OptionalTensor, int64_t, int64_t>>& slices, c10::Device device) {
            std::vector<Slice> given;
            for (const auto& [tensor, begin, end] : slices) given.push_back({tensor.value_or(at::Tensor()), begin, end});
            return digests.of(given, device);
          },
          py::arg("slices"), py::arg("device"), no_gil);

  py::class_<CallsKernels>(m, "CallsKernels", "csrc/device/launcher.h.")
      .def("wrote_around", of_launcher(&Launcher::wrote_around), no_gil)
      .def_property_readonly("launches", of_launcher(&Launcher::launches))
      .def_property_readonly("uploads", of_launcher(&Launcher::uploads));

  py::class_<Kernels, CallsKernels>(m, "Kernels", "Moves gradients to a wire and back, as the reducer does for one bucket.")
      .def(py::init([](c10::Device device, bool trial) { return make_kernels(device, purpose(trial)); }), py::arg("device"),
           py::arg("trial") = false)
      .def_static("of_operators", &make_aten_kernels, "Those made of torch's operators.")
      .def(
          "pack",
          [](Kernels& kernels, const OptionalTensors& gradients, const Tensors& views, double scale) {
            kernels.pack(slots(gradients, views), scale);
          },
          py::arg("gradients"), py::arg("views"), py::arg("scale") = 1.0, no_gil,
          "view = cast(gradient * scale) for each pair; zeros where the gradient is None.")
      .def(
          "pack_measuring",
          [](Kernels& kernels, const OptionalTensors& gradients, const Tensors& views, double scale) {
            auto sums = sums_of(views);
            kernels.pack(slots(gradients, views), scale, 0, &sums);
            return pairs(sums);
          },
          py::arg("gradients"), py::arg("views"), py::arg("scale") = 1.0, no_gil,
          "pack(); returns the sum of squares and the number of elements that are not finite of each gradient.")
      .def(
          "measure_gradients",
          [](Kernels& kernels, const OptionalTensors& gradients, const std::optional<Tensors>& given) {
            Tensors views;
            for (const auto& gradient : gradients) views.push_back(gradient.value());
            if (given) views = *given;
            auto sums = sums_of(views);
            kernels.measure_gradients(slots(gradients, views), sums);
            return pairs(sums);
          },
          py::arg("gradients"), py::arg("views") = py::none(), no_gil,
          "What pack_measuring() would return. `views` say in which order elements are read; None: in their own.")
      .def(
          "unpack",
          [](Kernels& kernels, const OptionalTensors& gradients, const Tensors& views, bool measuring) {
            return kernels.unpack(slots(gradients, views), measuring);
          },
          py::arg("gradients"), py::arg("views"), py::arg("measuring") = false, no_gil,
          "gradient = cast(view) for each pair whose gradient is not None; returns what measure() would, if asked and able.")
      .def(
          "measure", [](Kernels& kernels, const at::Tensor& wire) { return add_up(kernels.measure(wire)); }, py::arg("wire"),
          no_gil, "fp64 pair: the sum of squares, and the number of elements that are not finite.");

  py::class_<LowRankKernels, CallsKernels>(m, "LowRankKernels",
                                           "PowerSGD's kernels, over (gradient, memory, p, q); csrc/low_rank/kernels.h.")
      .def(py::init([](c10::Device device, bool trial) { return make_low_rank_kernels(device, purpose(trial)); }),
           py::arg("device"), py::arg("trial") = false)
      .def_static("of_operators", &make_aten_low_rank_kernels, "Those made of torch's operators.")
      .def_static("of_vectors", &make_cpu_low_rank_kernels, py::arg("most_bits"), "As Block8Kernels.of_vectors.")
      .def(
          "compress",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices, double scale, const OptionalTensors& before) {
            kernels.compress(low_rank_matrices(matrices, before), scale);
          },
          py::arg("matrices"), py::arg("scale") = 1.0, py::arg("before") = OptionalTensors(), no_gil,
          "`before`: the errors so far, by matrix; none: those in memory.")
      .def(
          "project",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices, double scale) {
            kernels.project(low_rank_matrices(matrices), scale);
          },
          py::arg("matrices"), py::arg("scale") = 1.0, no_gil)
      .def(
          "reconstruct",
          [](LowRankKernels& kernels, const std::vector<GivenMatrix>& matrices) {
            return add_up(kernels.reconstruct(low_rank_matrices(matrices)));
          },
          py::arg("matrices"), no_gil)
      .def(
          "orthogonalise",
          [](LowRankKernels& kernels, const std::vector<at::Tensor>& bases, double epsilon, std::optional<uint64_t> refill) {
            kernels.orthogonalise(numbered(bases), epsilon, refill);
          },
          py::arg("bases"), py::arg("epsilon") = 0.0, py::arg("refill") = py::none(), no_gil);

  py::class_<Block8Kernels, CallsKernels>(m, "Block8Kernels",
                                          "Gradients as numbers of 8 bits, (gradient, first block); csrc/block8/kernels.h.")
      .def(py::init([](const std::string& number, int64_t block, c10::Device device, bool trial) {
             return make_block8_kernels(block8_of(number, block), device, purpose(trial));
           }),
           py::arg("number"), py::arg("block"), py::arg("device"), py::arg("trial") = false)
      .def_static(
          "of_operators",
          [](const std::string& number, int64_t block) { return make_aten_block8_kernels(block8_of(number, block)); },
          py::arg("number"), py::arg("block"), "Those made of torch's operators.")
      .def_static(
          "of_vectors",
          [](const std::string& number, int64_t block, int64_t most_bits) {
            return make_cpu_block8_kernels(block8_of(number, block), most_bits);
          },
          py::arg("number"), py::arg("block"), py::arg("most_bits"),
          "Those of the CPU, as on a processor with vectors of at most 256 bits; or 0: of the baseline.")
      .def(
          "encode",
          [](Block8Kernels& kernels, const Blocked& gradients, const OptionalTensor& error, const at::Tensor& wire,
             double scale, std::optional<uint64_t> key, const OptionalTensor& before) {
            const auto own = error.value_or(at::Tensor());
            kernels.encode(blocked(gradients), before.value_or(own), own, wire, scale, rounding(key));
          },
          py::arg("gradients"), py::arg("error"), py::arg("wire"), py::arg("scale") = 1.0, py::arg("key") = py::none(),
          py::arg("before") = py::none(), no_gil, "`before`: the errors so far; None: those in `error`.")
      .def(
          "add",
          [](Block8Kernels& kernels, const Tensors& shards, const at::Tensor& target, const OptionalTensor& error,
             std::optional<uint64_t> key, int64_t first_element) {
            kernels.add(shards, target, error.value_or(at::Tensor()), rounding(key), first_element);
          },
          py::arg("shards"), py::arg("target"), py::arg("error"), py::arg("key") = py::none(), py::arg("first_element") = 0,
          no_gil)
      .def(
          "decode",
          [](Block8Kernels& kernels, const Blocked& gradients, const at::Tensor& wire) {
            return add_up(kernels.decode(blocked(gradients), wire));
          },
          py::arg("gradients"), py::arg("wire"), no_gil);

  // The tables that launchers make: for tests of the kernels that read them.
  m.def("pack_tables", &pack_tables, py::arg("gradients"), py::arg("views"), py::arg("chunk_elements"), py::arg("writable"),
        no_gil);
  m.def(
      "low_rank_tables",
      [](const std::vector<GivenMatrix>& given, int64_t rows, int64_t columns, int64_t step, int64_t elements,
         const OptionalTensors& before) {
        const auto all = low_rank_matrices(given, before);
        return std::map<std::string, Words>{{"matrices", matrix_words(all)},
                                            {"compress", compress_blocks(all, rows)},
                                            {"reconstruct", reconstruct_blocks(all, rows, columns)},
                                            {"project", project_blocks(all, step)},
                                            {"sums", sums(all, step, elements)},
                                            {"partials", {partial_numbers(all, step)}}};
      },
      py::arg("matrices"), py::arg("rows"), py::arg("columns"), py::arg("step"), py::arg("elements"),
      py::arg("before") = OptionalTensors(), no_gil);
  m.def(
      "basis_tables",
      [](const std::vector<at::Tensor>& bases, int64_t lines) {
        return std::map<std::string, Words>{{"bases", basis_words(numbered(bases), lines)},
                                            {"blocks", basis_blocks(numbered(bases), lines)}};
      },
      py::arg("bases"), py::arg("lines"), no_gil);
  m.def(
      "block8_tables",
      [](const Blocked& gradients, const Tensors& shards, int64_t block, int64_t elements) {
        const auto given = blocked(gradients);
        return std::map<std::string, Words>{{"gradients", gradient_words(given)},
                                            {"runs", run_words(given, {Block8::Number::int8, block}, elements)},
                                            {"shards", shard_words(shards)}};
      },
      py::arg("gradients"), py::arg("shards"), py::arg("block"), py::arg("elements"), no_gil);

  m.def(
      "capability",
      [](c10::Device device) -> std::optional<int> {
        const auto* driver = CudaDriver::of(device.type());
        return driver == nullptr ? std::nullopt : std::optional(driver->capability(device));
      },
      py::arg("device"), no_gil, "Compute capability without the dot; None where there is no CUDA driver.");
  m.def(
      "sum_shards",
      [](const at::Tensor& shards, const at::Tensor& target, bool trial) { sum_shards(shards, target, purpose(trial)); },
      py::arg("shards"), py::arg("target"), py::arg("trial") = false, no_gil,
      "target = the rows of shards, of 16 bits, added up in fp32 in their order and rounded once.");
  m.def("sum_shards_with_operators", &sum_shards_with_operators, py::arg("shards"), py::arg("target"), no_gil,
        "The same by torch's operators.");
  m.def(
      "write_words",
      [](const Words& words, const at::Tensor& target, bool trial) {
        Launcher launcher(target.device(), purpose(trial));
        const auto* kernel = launcher.find("fastddp_write_words");
        if (launched({kernel}, [&] { launcher.write(*kernel, target, words); })) return;
        target.zero_().narrow(0, 0, std::ssize(words)).copy_(at::tensor(words));
      },
      py::arg("words"), py::arg("target"), py::arg("trial") = false, no_gil,
      "What writes small tables to a GPU. The rest of the last group becomes 0.");
  py::enum_<Trust>(m, "Trust", "Whether a kernel is used; csrc/device/compiled_kernels.h.")
      .value("untried", Trust::untried)
      .value("proven", Trust::proven)
      .value("given_up", Trust::given_up);
  m.def("trust_in_kernel", &trust_in, py::arg("device"), py::arg("name"), no_gil,
        "None if it has neither been loaded nor given up.");
  m.def("prove_kernel", &note_proven, py::arg("device"), py::arg("name"), no_gil,
        "Use it from here on, unless it has been given up.");
  m.def(
      "give_up_kernel",
      [](c10::Device device, const std::string& name, const std::string& place, const std::string& reason) {
        return note_given_up({device, name, place, reason});
      },
      py::arg("device"), py::arg("name"), py::arg("place"), py::arg("reason"), no_gil,
      "Let torch's operators do its work from here on. Returns what to warn of; empty if it had been given up before.");
  m.def(
      "kernels_given_up",
      [] {
        std::vector<std::tuple<c10::Device, std::string, std::string, std::string>> all;
        for (const auto& [device, name, place, reason] : given_up()) all.emplace_back(device, name, place, reason);
        return all;
      },
      "Device, name, place and reason of each.");
  m.def(
      "load_kernel",
      [](c10::Device device, std::string name, const py::bytes& cubin, unsigned warps, unsigned shared_bytes, size_t parameters,
         size_t scratch, std::vector<int64_t> tile, std::string place, Trust trust) {
        const CompiledKernel kernel{std::move(name), cubin, warps, shared_bytes, parameters, scratch, std::move(tile)};
        const py::gil_scoped_release release;
        load_kernel(device, kernel, std::move(place), trust);
      },
      py::arg("device"), py::arg("name"), py::arg("cubin"), py::arg("warps"), py::arg("shared_bytes"), py::arg("parameters"),
      py::arg("scratch_parameters"), py::arg("tile"), py::arg("place") = "", py::arg("trust") = Trust::untried);
  m.def(
      "use_driver", [](const c10::Device& device, const std::string& library) { CudaDriver::use(device.type(), library); },
      py::arg("device"), py::arg("library"), no_gil, "Make a library the CUDA driver of a kind of device.");
}

}  // namespace fastddp
