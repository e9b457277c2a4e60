#include <pybind11/functional.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include "bindings/bindings.h"
#include "bucket/shard.h"
#include "device/huge_pages.h"
#include "transport/gather.h"
#include "transport/outbox.h"
#include "trip/way.h"

namespace fastddp {
namespace {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

using AllocateInPython =
    std::function<OptionalTensor(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, c10::Device device)>;

using Matrices = std::vector<std::pair<OptionalTensor, OptionalTensor>>;  // error, q

std::vector<LowRankMemory::Matrix> matrices(const Matrices& given) {
  std::vector<LowRankMemory::Matrix> result;
  for (const auto& [error, q] : given) result.push_back({error.value_or(at::Tensor()), q.value_or(at::Tensor())});
  return result;
}

Looked look_at(PyObject* object) {
  const py::gil_scoped_acquire acquire;
  return {THPVariable_Check(object) ? THPVariable_Unpack(object) : at::Tensor(),
          py::str(py::type::handle_of(object).attr("__qualname__"))};
}

}  // namespace

void bind_exchanges(py::module_& m) {
  m.def("view_of", &view_of, py::arg("wire"), py::arg("parameter"), py::arg("offset"), "csrc/bucket/gradient_memory.h", no_gil);

  py::class_<Block8Errors, std::shared_ptr<Block8Errors>>(m, "Block8Errors", "What block8 has left out; csrc/codec/codec.h.")
      .def(py::init<>())
      .def("copy", [](const Block8Errors& errors) { return std::make_shared<Block8Errors>(errors); })
      .def_property(
          "of_parameters", [](const Block8Errors& errors) { return errors.of_parameters; },  // undefined: None
          [](Block8Errors& errors, const std::vector<OptionalTensor>& all) {
            errors.of_parameters.clear();
            errors.kept.clear();
            for (const auto& error : all) errors.of_parameters.push_back(error.value_or(at::Tensor()));
          });

  py::class_<Codec, std::shared_ptr<Codec>>(m, "Codec", "What travels in place of gradients; csrc/codec/codec.h.")
      .def_static("cast", &make_cast, py::arg("wire") = py::none(), no_gil)
      .def_static(
          "block8",
          [](const std::string& number, int64_t block, std::shared_ptr<Block8Errors> errors, std::optional<uint64_t> seed,
             uint64_t first_window, uint64_t rank) {
            const Block8Options options{block8_of(number, block), seed, first_window, rank};
            return make_block8(options, std::move(errors));
          },
          py::arg("number"), py::arg("block"), py::arg("errors"), py::kw_only(), py::arg("seed"), py::arg("first_window"),
          py::arg("rank"), no_gil)
      .def_static(
          "low_rank",
          [](const Matrices& of_parameters, const Matrices& of_buckets, bool error_feedback, bool warm_start, double epsilon,
             uint64_t seed, uint64_t first_window, std::optional<c10::ScalarType> wire) {
            const LowRankOptions options{error_feedback, warm_start, !of_buckets.empty(), epsilon, seed, first_window, wire};
            return make_low_rank(options, {matrices(of_parameters), matrices(of_buckets)});
          },
          py::arg("of_parameters"), py::arg("of_buckets"), py::kw_only(), py::arg("error_feedback"), py::arg("warm_start"),
          py::arg("epsilon"), py::arg("seed"), py::arg("first_window"), py::arg("wire"), no_gil);

  py::class_<Lanes>(m, "Lanes", "Process groups of the same ranks; csrc/transport/lanes.h.")
      .def(py::init<Groups, Processes>(), py::arg("groups"), py::arg("processes") = Processes());
  py::implicitly_convertible<Groups, Lanes>();
  m.def("let_siblings_read", &let_siblings_read, "Of this process's parent; csrc/transport/outbox.h.");
  m.def("has_bytes", &has_bytes, "Whether a process has these bytes; csrc/transport/outbox.h.", py::arg("process"),
        py::arg("address"), py::arg("bytes"), no_gil);

  py::class_<Shard, std::shared_ptr<Shard>>(m, "Shard", "A rank's part of a bucket's gradients; csrc/bucket/shard.h.");
  py::class_<Sharding, std::shared_ptr<Sharding>>(m, "Sharding", "Which rank has what; csrc/bucket/sharding.h.")
      .def(py::init(without_gil([](const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, Plan plan,
                                   size_t ranks, size_t rank, bool whole, bool for_optimizer) {
             std::optional<Sharding::Units> units;
             if (for_optimizer) units = {Block8::kLongestBlock, Block8::kLongestGroup};
             return std::make_shared<Sharding>(parameters, names, std::move(plan), ranks, rank, whole, units);
           })),
           py::arg("parameters"), py::arg("names"), py::arg("plan"), py::arg("ranks"), py::arg("rank"), py::arg("whole"),
           py::arg("for_optimizer") = false)
      .def(
          "spans",
          [](const Sharding& sharding, size_t bucket) {
            std::vector<std::tuple<size_t, int64_t, int64_t, int64_t>> spans;
            for (const auto& span : sharding.spans(bucket)) {
              spans.emplace_back(span.parameter, span.begin, span.end, span.offset);
            }
            return spans;
          },
          "This rank's: parameter, begin, end, place in the wire.", py::arg("bucket"))
      .def(
          "run",
          [](const Sharding& sharding, size_t bucket) {
            const auto& [begin, end] = sharding.run(bucket);
            return std::pair(begin, end);
          },
          py::arg("bucket"))
      .def("places", &Sharding::places, py::arg("bucket"))
      .def("length", &Sharding::length, py::arg("bucket"))
      .def(
          "shards",
          [](const Sharding& sharding, std::vector<std::vector<at::Tensor>> holders, const std::vector<at::Tensor>& notices) {
            std::vector<std::shared_ptr<Shard>> shards;
            for (size_t bucket = 0; bucket < sharding.buckets(); ++bucket) {
              std::vector<at::Tensor> of_members;
              for (const auto parameter : sharding.parameters(bucket)) of_members.push_back(notices.at(parameter));
              shards.push_back(std::make_shared<Shard>(sharding, bucket, std::move(holders.at(bucket)), std::move(of_members)));
            }
            return shards;
          },
          "This rank's, by bucket. `holders`: by bucket and span, the optimizer's tensors; `notices`: by parameter.",
          py::arg("holders"), py::arg("notices"), no_gil);

  m.def(
      "empty_in_huge_pages",
      [](int64_t elements, const at::Tensor& like) { return empty_in_huge_pages(elements, like.options()); },
      "One-dimensional, like a tensor; csrc/device/huge_pages.h.", py::arg("elements"), py::arg("like"), no_gil);

  py::class_<Gather, std::shared_ptr<Gather>>(m, "Gather", "Parameters go to all ranks; csrc/transport/gather.h.")
      .def(py::init(without_gil([](Lanes lanes, const std::shared_ptr<Sharding>& sharding,
                                   std::shared_ptr<Interruption> interruption, size_t model) {
             return destroyed_without_gil(std::make_unique<Gather>(std::move(lanes), sharding->device(), runs_of(sharding),
                                                                   sharding->buckets(), std::move(interruption), model));
           })),
           py::arg("lanes"), py::arg("sharding"), py::arg("interruption"), py::arg("model") = 0);

  py::class_<Way, std::shared_ptr<Way>>(m, "Way", "How gradients travel; csrc/trip/way.h.")
      .def(py::init(without_gil([](std::shared_ptr<Codec> codec, Lanes lanes, Nodes nodes, bool divides) {
             auto all = lanes.all().front();
             return destroyed_without_gil(std::make_unique<Way>(Way{.all = std::move(all),
                                                                    .codec = std::move(codec),
                                                                    .lanes = std::move(lanes),
                                                                    .nodes = std::move(nodes),
                                                                    .divides = divides}));
           })),
           py::arg("codec"), py::arg("lanes"), py::kw_only(), py::arg("nodes") = Nodes(), py::arg("divides") = false)
      .def_static(
          "nowhere", [] { return destroyed_without_gil(std::make_unique<Way>()); }, no_gil)
      .def_static(
          "by_hook",
          [](py::object state, py::object hook, std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group, Groups others) {
            auto call = std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
            auto run = std::make_shared<Hook>(std::move(call), std::move(name), group, &look_at);
            Way way{.all = std::move(group), .hook = std::move(run), .hook_groups = std::move(others)};
            return destroyed_without_gil(std::make_unique<Way>(std::move(way)));
          },
          py::arg("state"), py::arg("hook"), py::arg("name"), py::arg("process_group"), py::arg("others"))
      .def_readwrite("all", &Way::all)
      .def_readwrite("node", &Way::node)
      .def_readwrite("sharding", &Way::sharding)
      .def_readwrite("shards", &Way::shards)
      .def_readwrite("steps_optimizers", &Way::steps_optimizers);

  py::class_<RegisteredMemory, std::shared_ptr<RegisteredMemory>>(m, "RegisteredMemory",
                                                                  "Where wires come from; csrc/transport/registered_memory.h.")
      .def(py::init([](AllocateInPython allocate, bool symmetric) {
             const auto call = [allocate = std::move(allocate)](const auto&... arguments) {
               return allocate(arguments...).value_or(at::Tensor());
             };
             return std::make_shared<RegisteredMemory>(RegisteredMemory{call, symmetric});
           }),
           py::arg("allocate"), py::kw_only(), py::arg("symmetric"));
}

}  // namespace fastddp
