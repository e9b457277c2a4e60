// A tool that listens to NVTX, as Nsight Systems does: writes a line for each call in the domain `fastddp` to the file that
// FASTDDP_NVTX_LOG names.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

FILE* log() {
  static FILE* file = std::fopen(std::getenv("FASTDDP_NVTX_LOG"), "w");
  return file;
}

nvtxDomainHandle_t create(const char* name) {
  static int ours;
  return std::strcmp(name, "fastddp") == 0 ? reinterpret_cast<nvtxDomainHandle_t>(&ours) : nullptr;
}

void write(const char* what, const char* name) {
  std::fprintf(log(), "%s %s\n", what, name);
  std::fflush(log());
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  write("push", attributes->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t) {
  write("pop", "");
  return 0;
}

nvtxRangeId_t start(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  static nvtxRangeId_t last = 0;
  write("start", attributes->message.ascii);
  return ++last;
}

void end(nvtxDomainHandle_t, nvtxRangeId_t range) {
  write("end", std::to_string(range).c_str());
}

template <typename Function>
void set(NvtxFunctionTable table, int callback, Function* function) {
  *table[callback] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* tables = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  set(table, NVTX_CBID_CORE2_DomainCreateA, create);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, pop);
  set(table, NVTX_CBID_CORE2_DomainRangeStartEx, start);
  set(table, NVTX_CBID_CORE2_DomainRangeEnd, end);
  return 1;
}
