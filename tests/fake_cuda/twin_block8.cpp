// encode, add and decode of block8: kernels/block8_kernels.py, computed by fastddp's kernels for the CPU.
#include <algorithm>
#include <regex>

#include "block8/kernels.h"
#include "pack/kernels.h"
#include "twin.h"

namespace fake_cuda {
namespace {

using fastddp::Block8;

constexpr int64_t kElements = 4096;  // of one program of add

// What a kernel's name says.
struct Form {
  c10::ScalarType gradient;
  Block8 format;
  bool draws;

  fastddp::Block8Kernels& kernels() const {
    static auto* all = new std::map<std::pair<Block8::Number, int64_t>, std::unique_ptr<fastddp::Block8Kernels>>();
    auto& found = (*all)[{format.number, format.block}];
    if (found == nullptr) found = fastddp::make_cpu_block8_kernels(format);
    return *found;
  }
  fastddp::Rounding rounding(const Launch& launch) const {
    return draws ? fastddp::Rounding{fastddp::Dice{launch.values.at(6)}} : std::nullopt;
  }
};

// Row of the table of runs.
struct Run {
  int64_t gradient;
  int64_t begin;
  int64_t block;
  int64_t count;
};

// What one program of encode or decode works on.
struct Part {
  const Launch& launch;
  const Form& form;
  const Run& run;

  fastddp::BlockedGradient gradient(size_t table) const {
    auto* address = launch.row<char*>(table, run.gradient) + run.begin * size_of(form.gradient);
    return {launch.elements(address, run.count, form.gradient), run.block};
  }

  // From the beginning to the last group that the run writes to; what it does not touch need not be there.
  at::Tensor wire() const {
    const auto first = run.block / Block8::kBlocks * form.format.group_bytes();
    const auto end = groups() * form.format.group_bytes();
    launch.check(launch.pointer<uint8_t>(0) + first, end - first);
    return at::from_blob(launch.pointer<uint8_t>(0), {end}, at::kByte);
  }

  at::Tensor errors(size_t argument) const {
    auto* address = launch.pointer<float>(argument);
    if (address == nullptr) return {};
    const auto blocks = form.format.blocks_of(run.count);
    launch.elements(address + run.block * form.format.block, blocks * form.format.block, at::kFloat);
    return at::from_blob(address, {groups() * form.format.group_elements()}, at::kFloat);
  }

 private:
  int64_t groups() const { return (run.block + form.format.blocks_of(run.count) + Block8::kBlocks - 1) / Block8::kBlocks; }
};

void encode(const Launch& launch, const Form& form, int64_t number) {
  const Part program{launch, form, launch.row<Run>(4, number)};
  form.kernels().encode({program.gradient(3)}, program.errors(1), program.errors(2), program.wire(), launch.real(5),
                        form.rounding(launch));
}

void decode(const Launch& launch, const Form& form, int64_t number) {
  const Part program{launch, form, launch.row<Run>(2, number)};
  launch.pair(3, number).copy_(fastddp::add_up(form.kernels().decode({program.gradient(1)}, program.wire())));
}

void add(const Launch& launch, const Form& form, int64_t number) {
  const auto group_bytes = form.format.group_bytes(), group_elements = form.format.group_elements();
  const auto per_program = kElements / group_elements, first = number * per_program;
  const auto groups = std::min(per_program, launch.integer(4) / Block8::kBlocks - first);
  const auto part_of = [&](uint8_t* address) {
    return launch.elements(address + first * group_bytes, groups * group_bytes, at::kByte);
  };
  std::vector<at::Tensor> shards;
  for (int64_t i = 0; i < launch.integer(1); ++i) shards.push_back(part_of(launch.row<uint8_t*>(0, i)));
  at::Tensor error;
  if (auto* address = launch.pointer<float>(3); address != nullptr) {
    error = launch.elements(address + first * group_elements, groups * group_elements, at::kFloat);
  }
  form.kernels().add(shards, part_of(launch.pointer<uint8_t>(2)), error, form.rounding(launch),
                     launch.integer(5) + first * group_elements);
}

}  // namespace

std::optional<Twin> block8_twin(const std::string& kernel) {
  static const std::regex pattern(
      "fastddp_block8_(encode|add|decode)(?:_(fp32|fp16|bf16))?_(int8|e4m3|e5m2)_(128|256)(_drawn)?");
  std::smatch match;
  if (!std::regex_match(kernel, match, pattern)) return std::nullopt;
  const auto number = match[3] == "int8"   ? Block8::Number::int8
                      : match[3] == "e4m3" ? Block8::Number::e4m3
                                           : Block8::Number::e5m2;
  const Form form{match[2].matched ? dtype_of(match[2]) : at::kFloat, {number, std::stoll(match[4])}, match[5].matched};
  const auto run = match[1] == "add" ? add : match[1] == "decode" ? decode : encode;
  return Twin{match[1] == "decode" ? size_t{4} : size_t{7},
              [=](const Launch& launch, int64_t program) { run(launch, form, program); }};
}

}  // namespace fake_cuda
