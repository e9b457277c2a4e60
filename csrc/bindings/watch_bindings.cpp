// What others see of a rank's progress.
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <pthread.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "observe/device_progress.h"
#include "observe/progress.h"
#include "watch/diagnosis.h"
#include "watch/links.h"
#include "watch/python_calls.h"
#include "watch/stall_watch.h"
#include "window/window.h"

namespace fastddp {

namespace {

// Note [Torn frames]
// A thread that seems to stand still may run after all, for example on a machine that is too busy. Then its frames change while
// we read them, and a pointer may lead nowhere. That must not end a training: if the reading thread faults, it jumps out of the
// read. If another thread faults, we restore the handler that was there before, and the faulting instruction runs again. The
// code that reads takes no lock and no memory, so the jump leaves nothing behind.
std::atomic<bool> is_reading{false};
std::atomic<pthread_t> reader;
sigjmp_buf out_of_reading;
constexpr std::array<int, 2> kFaults = {SIGSEGV, SIGBUS};
struct sigaction handled_before[kFaults.size()];

void on_fault(int signal) {
  if (is_reading && pthread_equal(reader, pthread_self()) != 0) siglongjmp(out_of_reading, 1);
  sigaction(signal, &handled_before[signal == kFaults[0] ? 0 : 1], nullptr);
}

// Whether `read` came to its end and returned true.
template <typename Read>
bool reads_torn_frames(const Read& read) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  struct sigaction action{};
  action.sa_handler = on_fault;
  for (size_t i = 0; i < kFaults.size(); ++i) sigaction(kFaults[i], &action, &handled_before[i]);
  reader = pthread_self();
  is_reading = true;
  const bool has_begun = sigsetjmp(out_of_reading, /*savesigs=*/1) == 0;
  const bool is_read = has_begun && read();
  is_reading = false;
  for (size_t i = 0; i < kFaults.size(); ++i) sigaction(kFaults[i], &handled_before[i], nullptr);
  return is_read;
}

// The calls of the main thread, the innermost last. They are found as faulthandler's watchdog does it: without the GIL, which
// the main thread may hold. Empty if this Python cannot do it.
std::vector<PythonCall> calls_without_gil() {
  using Dump = const char* (*)(int, PyInterpreterState*, PyThreadState*);
  const auto dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  const auto file = std::unique_ptr<std::FILE, int (*)(std::FILE*)>(std::tmpfile(), std::fclose);
  if (dump == nullptr || !file) return {};
  const auto number = fileno(file.get());
  if (!reads_torn_frames([&] { return dump(number, nullptr, nullptr) == nullptr; })) return {};
  std::rewind(file.get());
  const std::regex of_call(R"re(  File "(.*)", line (\d+) in (.*))re");
  std::smatch found;
  std::vector<PythonCall> calls;
  std::array<char, 1024> line{};
  while (std::fgets(line.data(), line.size(), file.get()) != nullptr) {
    std::string text = line.data();
    text.erase(text.find_last_not_of('\n') + 1);
    // The main thread was made first, and is listed last.
    if (text.find("hread 0x") != std::string::npos) calls.clear();
    if (std::regex_match(text, found, of_call)) calls.push_back({found[1], std::stoi(found[2]), found[3], ""});
  }
  std::ranges::reverse(calls);
  return calls;
}

}  // namespace

void bind_watch(py::module_& m) {
  py::module_::import("fastddp._pages");  // has Snapshot

  py::class_<Progress, std::shared_ptr<Progress>>(m, "Progress", "A rank's page; csrc/observe/progress.h.")
      .def(py::init<const std::vector<std::string>&, int, int>(), py::arg("parameters"), py::arg("rank"), py::arg("ranks"))
      .def_property_readonly("path", &Progress::path)
      .def("belongs_to", &Progress::belongs_to, py::arg("job"), py::arg("script") = "", py::arg("generation") = 0)
      .def("fails_for_others", &Progress::fails_for_others)
      .def("process_ends", &Progress::process_ends, py::arg("error") = "", py::arg("stays") = false)
      .def("read", &Progress::read, no_gil);

  py::class_<DeviceProgress, std::shared_ptr<DeviceProgress>>(m, "DeviceProgress", "csrc/observe/device_progress.h.")
      .def("watch", &DeviceProgress::watch)
      .def("look", &DeviceProgress::look, no_gil);

  m.def(
      "bury", [](Groups groups) { Interruption::bury(std::move(groups), 0); }, py::arg("groups"),
      "Destroys process groups in another thread; csrc/waits/interruption.h.", no_gil);
  py::class_<Interruption, std::shared_ptr<Interruption>>(m, "Interruption", "csrc/waits/interruption.h.")
      .def(py::init([](Groups groups) {
             auto made = std::make_shared<Interruption>();
             made->may_abort(std::move(groups));
             return made;
           }),
           py::arg("groups"))
      .def_property_readonly("groups", &Interruption::groups)
      .def("abort_groups", &Interruption::abort_groups, no_gil)
      .def("interrupt", &Interruption::interrupt, py::arg("why"), no_gil)
      .def_property_readonly("is_interrupted", &Interruption::is_interrupted);

  m.def(
      "wait_outside",
      [](const c10::intrusive_ptr<c10d::Work>& work, const std::vector<std::shared_ptr<Interruption>>& all,
         const std::shared_ptr<Progress>& progress) {
        std::optional<Progress::Wait> wait;
        if (progress) wait.emplace(*progress, What::agree, 0);
        Interruption::wait_outside(*work, all);
      },
      py::arg("work"), py::arg("interruptions"), py::arg("progress"), no_gil);

  // A profiler frees its events when it stops. When a collective of gloo's ends later than that, torch writes into its event all
  // the same. So a collective that nobody waits for has none.
  m.def(
      "unrecorded",
      [](const py::function& start) {
        const at::RecordFunctionGuard is_off(/*is_enabled=*/false);
        return start();
      },
      py::arg("start"));

  py::class_<Links>(m, "Links", "csrc/watch/links.h.")
      .def(py::init<>())
      .def("look", &Links::look, no_gil)
      .def("ask", &Links::ask)
      .def("leave", &Links::leave)
      .def_property_readonly("unanswered", &Links::unanswered)
      .def_property_readonly("moved", &Links::moved);

  m.def(
      "diagnose",
      [](const std::vector<std::string>& records, int ranks) {
        std::vector<Record> decoded;
        for (const auto& text : records) decoded.push_back(decode_record(text));
        return diagnose(decoded, ranks).json();
      },
      py::arg("records"), py::arg("ranks"), no_gil);
  m.def(
      "record_of", [](const Progress& progress, double still) { return encode(record_of(progress.read(), Life::runs, still)); },
      py::arg("progress"), py::arg("still"), no_gil);

  py::class_<StallWatch, std::shared_ptr<StallWatch>>(m, "StallWatch", "csrc/watch/stall_watch.h.")
      .def(py::init(without_gil([](std::shared_ptr<const Progress> progress, c10::intrusive_ptr<c10d::Store> store,
                                   std::string key, uint64_t job, double patience, bool prints,
                                   std::shared_ptr<Interruption> raises, std::shared_ptr<DeviceProgress> device,
                                   std::shared_ptr<Interruption> waits, Libraries libraries, double idle_patience) {
             auto stack = [libraries = std::move(libraries)] { return in_lines(calls_without_gil(), libraries); };
             return destroyed_without_gil(
                 std::make_unique<StallWatch>(std::move(progress), std::move(store), std::move(key), job,
                                              StallWatch::Settings{patience, idle_patience, prints, std::move(raises),
                                                                   std::move(device), std::move(waits), std::move(stack)}));
           })),
           py::arg("progress"), py::arg("store"), py::arg("key"), py::arg("job"), py::arg("patience"), py::arg("prints"),
           py::arg("raises") = nullptr, py::arg("device") = nullptr, py::arg("waits") = nullptr,
           py::arg("libraries") = Libraries{}, py::arg("idle_patience") = std::numeric_limits<double>::infinity())
      .def("wants_stack", [](StallWatch& watch) { return watch.stack().is_wanted(); })
      .def(
          "give_stack", [](StallWatch& watch, std::vector<std::string> lines) { watch.stack().give(std::move(lines)); },
          py::arg("lines"))
      .def(
          "take_report",
          [](StallWatch& watch) {
            const auto report = watch.take_report();
            return report ? std::optional(report->json()) : std::nullopt;
          },
          no_gil)
      .def("name_who_has_ended", &StallWatch::name_who_has_ended, no_gil)
      .def("leaves_others", &StallWatch::leaves_others, no_gil)
      .def("who_has_ended", &StallWatch::who_has_ended, py::arg("looks") = StallWatch::kLooks, no_gil)
      .def("report_of_open_step", &StallWatch::report_of_open_step, no_gil)
      .def("ask_who_has", &StallWatch::ask_who_has, py::arg("patience"), no_gil);

  py::class_<Lack>(m, "Lack", "csrc/watch/who_has.h.")
      .def_readonly("parameters", &Lack::parameters)
      .def_readonly("waits", &Lack::waits);

  m.def(
      "calls_without_gil", [] { return in_lines(calls_without_gil(), {}); }, no_gil,
      "Calls of the main thread, which may run meanwhile: what is read then may be nonsense, or nothing.");
  m.def(
      "calls_in_lines",
      [](const std::vector<std::tuple<std::string, int, std::string, std::string>>& calls, const Libraries& libraries) {
        std::vector<PythonCall> all;
        for (const auto& [file, line, function, source] : calls) all.push_back({file, line, function, source});
        return in_lines(all, libraries);
      },
      py::arg("calls"), py::arg("libraries"), no_gil);
  m.def("remove_own_pages", &remove_own_pages, no_gil);
}

}  // namespace fastddp
