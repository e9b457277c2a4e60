// encode, add and decode of block8: kernels/block8_kernels.py, computed by fastddp's kernels for the CPU.
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <regex>

#include "codec/block8_kernels.h"
#include "pack/kernels.h"
#include "twin.h"

namespace fake_cuda {
namespace {

using fastddp::Block8;

constexpr int64_t kElements = 4096;  // of one program
constexpr size_t kRunWords = 4;

// What a kernel's name says.
struct Block8Form {
  std::string form;
  c10::ScalarType gradient;
  Block8 format;
  bool draws;
};

// Row of the table of runs.
struct Run {
  int64_t gradient;
  int64_t begin;
  int64_t block;
  int64_t count;
};

std::optional<Block8Form> block8_form_of(const std::string& kernel) {
  static const std::regex pattern(
      "fastddp_block8_(encode|add|decode)(?:_(fp32|fp16|bf16))?_(int8|e4m3|e5m2)_(128|256)(_drawn)?");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto gradient = match[2] == "fp16" ? at::kHalf : match[2] == "bf16" ? at::kBFloat16 : at::kFloat;
  const auto number = match[3] == "int8"   ? Block8::Number::int8
                      : match[3] == "e4m3" ? Block8::Number::e4m3
                                           : Block8::Number::e5m2;
  return Block8Form{match[1], gradient, {number, std::stoll(match[4])}, match[5].matched};
}

fastddp::Block8Kernels& on_the_cpu(Block8 format) {
  static auto* kernels = new std::map<std::pair<Block8::Number, int64_t>, std::unique_ptr<fastddp::Block8Kernels>>();
  auto& found = (*kernels)[{format.number, format.block}];
  if (found == nullptr) found = fastddp::make_cpu_block8_kernels(format);
  return *found;
}

// One program of a launch.
class Block8Program {
 public:
  Block8Program(const Launch& launch, const Block8Form& form, int64_t number)
      : launch_(launch), form_(form), format_(form.format), number_(number) {}

  void run() const {
    if (form_.form == "encode") {
      const auto run = row(4);
      cpu().encode({gradient(3, run)}, errors(1, run), errors(2, run), wire(0, run), launch_.real(5), rounding(6));
    } else if (form_.form == "add") {
      add();
    } else {
      const auto run = row(2);
      const auto measured = fastddp::add_up(cpu().decode({gradient(1, run)}, wire(0, run)));
      at::from_blob(launch_.pointer<double>(3) + 2 * number_, {2}, at::kDouble).copy_(measured);
    }
  }

 private:
  fastddp::Block8Kernels& cpu() const { return on_the_cpu(format_); }

  Run row(size_t runs) const { return launch_.pointer<const Run>(runs)[number_]; }

  fastddp::Rounding rounding(size_t key) const {
    if (!form_.draws) return std::nullopt;
    return fastddp::Dice{launch_.values.at(key)};
  }

  fastddp::BlockedGradient gradient(size_t table, const Run& run) const {
    const auto address = *launch_.checked(launch_.pointer<const int64_t>(table) + run.gradient, 1);
    const auto size = static_cast<int64_t>(c10::elementSize(form_.gradient));
    auto* first = launch_.checked(reinterpret_cast<char*>(address) + run.begin * size, run.count * size);
    return {at::from_blob(first, {run.count}, form_.gradient), run.block};
  }

  // From the beginning to the last group that the run writes to; what it does not touch need not be there.
  at::Tensor wire(size_t index, const Run& run) const {
    auto* address = launch_.pointer<uint8_t>(index);
    const auto first = run.block / Block8::kBlocks, groups = groups_to(run);
    launch_.checked(address + first * format_.group_bytes(), (groups - first) * format_.group_bytes());
    return at::from_blob(address, {groups * format_.group_bytes()}, at::kByte);
  }

  at::Tensor errors(size_t index, const Run& run) const {
    auto* address = launch_.pointer<float>(index);
    if (address == nullptr) return {};
    const auto blocks = format_.blocks_of(run.count);
    launch_.checked(address + run.block * format_.block, blocks * format_.block);
    return at::from_blob(address, {groups_to(run) * format_.group_elements()}, at::kFloat);
  }

  int64_t groups_to(const Run& run) const {
    return (run.block + format_.blocks_of(run.count) + Block8::kBlocks - 1) / Block8::kBlocks;
  }

  void add() const {
    const auto per_program = kElements / format_.group_elements();
    const auto first = number_ * per_program;
    const auto groups = std::min(per_program, launch_.integer(4) / Block8::kBlocks - first);
    const auto part_of = [&](uint8_t* address) {
      auto* begin = address + first * format_.group_bytes();
      const auto bytes = groups * format_.group_bytes();
      return at::from_blob(launch_.checked(begin, bytes), {bytes}, at::kByte);
    };
    std::vector<at::Tensor> shards;
    const auto* addresses = launch_.checked(launch_.pointer<uint8_t* const>(0), launch_.integer(1));
    for (int64_t i = 0; i < launch_.integer(1); ++i) shards.push_back(part_of(addresses[i]));
    at::Tensor error;
    if (auto* address = launch_.pointer<float>(3); address != nullptr) {
      const auto elements = groups * format_.group_elements();
      error =
          at::from_blob(launch_.checked(address + first * format_.group_elements(), elements), {elements}, at::kFloat);
    }
    const auto first_element = launch_.integer(5) + first * format_.group_elements();
    cpu().add(shards, part_of(launch_.pointer<uint8_t>(2)), error, rounding(6), first_element);
  }

  const Launch& launch_;
  const Block8Form& form_;
  const Block8 format_;
  const int64_t number_;
};

std::vector<Named> memory_of_runs(const Launch& launch, size_t gradients) {
  return {{"the wire", launch.pointer<void>(0), 1},
          {"the table of gradients", launch.pointer<void>(gradients), sizeof(int64_t)},
          {"the table of runs", launch.pointer<void>(gradients + 1), launch.programs * kRunWords * sizeof(int64_t)}};
}

std::vector<Named> memory_of(const std::string& form, const Launch& launch) {
  if (form == "decode") {
    auto memory = memory_of_runs(launch, 1);
    memory.push_back({"partial results", launch.pointer<void>(3), launch.programs * 2 * sizeof(double)});
    return memory;
  }
  const size_t error = form == "add" ? 3 : 1;
  auto memory = form == "add" ? std::vector<Named>{{"the table of shards", launch.pointer<void>(0), sizeof(int64_t)},
                                                   {"the target", launch.pointer<void>(2), 1}}
                              : memory_of_runs(launch, 3);
  const auto add = [&](const char* name, size_t index) {
    if (launch.pointer<void>(index) != nullptr) memory.push_back({name, launch.pointer<void>(index), sizeof(float)});
  };
  add("the errors", error);
  if (form == "encode") add("the errors that are kept", 2);
  return memory;
}

}  // namespace

std::optional<Twin> block8_twin(const std::string& kernel) {
  static const auto* parameters = new std::map<std::string, size_t>{{"encode", 7}, {"add", 7}, {"decode", 4}};
  const auto form = block8_form_of(kernel);
  if (!form.has_value()) return std::nullopt;
  const auto memory = [form](const Launch& launch) { return memory_of(form->form, launch); };
  const auto run = [form](const Launch& launch, int64_t program) { Block8Program(launch, *form, program).run(); };
  return Twin{parameters->at(form->form), memory, run};
}

}  // namespace fake_cuda
