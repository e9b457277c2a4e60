#include "twin.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace fake_cuda {
namespace {

constexpr size_t kScratch = 2;

std::optional<Twin> twin_of(const std::string& kernel) {
  for (const auto& find : {pack_twin, low_rank_twin, basis_twin, block8_twin, sums_twin}) {
    if (auto twin = find(kernel)) return twin;
  }
  return std::nullopt;
}

}  // namespace

bool has_twin(const Kernel& kernel) {
  return twin_of(kernel.name).has_value();
}

std::optional<Launch> read_launch(const Kernel& kernel, const std::vector<uint64_t>& values, unsigned programs,
                                  c10::DeviceIndex device) {
  const auto is_word = [](const Parameter& parameter) { return parameter.size == sizeof(uint64_t); };
  const auto own = twin_of(kernel.name)->parameters;
  if (values.size() != own + kScratch || !std::ranges::all_of(kernel.parameters, is_word)) return std::nullopt;
  const auto scratch = values.begin() + static_cast<std::ptrdiff_t>(own);
  if (std::any_of(scratch, values.end(), [](uint64_t value) { return value != 0; })) return std::nullopt;
  return Launch{kernel.name, {values.begin(), scratch}, programs, device, Fault::none};
}

std::string problem_with_pointers(const Launch& launch) {
  for (const auto& [name, address, bytes] : twin_of(launch.kernel)->memory(launch)) {
    if (!is_allocated(address, bytes, launch.device)) return name;
  }
  return "";
}

void execute(const Launch& launch, const std::string& problem) {
  TORCH_CHECK(problem.empty(), "illegal memory access: kernel ", launch.kernel, " was launched on device ",
              static_cast<int>(launch.device), " with a pointer to ", problem,
              " that was not in allocated memory there");
  std::vector<int64_t> programs(launch.programs);
  std::iota(programs.begin(), programs.end(), 0);
  static std::mt19937 random;
  std::ranges::shuffle(programs, random);
  if (launch.fault == Fault::program) programs.pop_back();
  const auto twin = twin_of(launch.kernel);
  for (const auto program : programs) twin->run(launch, program);
  if (launch.fault == Fault::bit) *static_cast<char*>(const_cast<void*>(twin->memory(launch)[0].address)) ^= 1;
}

}  // namespace fake_cuda
