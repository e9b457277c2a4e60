#include "observe/ranges.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FASTDDP_NVTX
#endif

namespace fastddp {
namespace {

constexpr auto kScope = at::RecordScope::USER_SCOPE;

#ifdef FASTDDP_NVTX

// Null where no tool listens.
nvtxDomainHandle_t domain() {
  static const auto handle = nvtxDomainCreateA("fastddp");
  return handle;
}

nvtxEventAttributes_t message(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  return attributes;
}

void push(const std::string& name) {
  const auto attributes = message(name);
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop() {
  nvtxDomainRangePop(domain());
}

uint64_t start(const std::string& name) {
  const auto attributes = message(name);
  return nvtxDomainRangeStartEx(domain(), &attributes);
}

void stop(uint64_t range) {
  nvtxDomainRangeEnd(domain(), range);
}

#else

void* domain() {
  return nullptr;
}
void push(const std::string&) {}
void pop() {}
uint64_t start(const std::string&) {
  return 0;
}
void stop(uint64_t) {}

#endif

std::string named(const char* what) {
  return std::string("fastddp.") + what;
}

}  // namespace

const char* dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    default:
      return c10::toString(dtype);
  }
}

bool nvtx_listens() {
  return domain() != nullptr;
}

Range::Range() : record_(kScope), nvtx_(nvtx_listens()) {}

Range::Range(const std::string& name) : Range() {
  if (is_heard()) begin(name);
}

Range::~Range() {
  if (nvtx_) pop();
}

void Range::begin(const char* what, const std::string& keys) {
  begin(named(what) + keys);
}

void Range::begin(const std::string& name) {
  if (nvtx_) push(name);
  if (record_.isActive()) record_.before(std::string_view(name));
}

void LongRange::begin() {
  end();
  at::RecordFunction moment(kScope);
  if (moment.isActive()) moment.before(std::string_view(named(what_)));
  if (nvtx_listens()) nvtx_ = start(named(what_));
}

void LongRange::end() {
  if (nvtx_) stop(*nvtx_);
  nvtx_.reset();
}

}  // namespace fastddp
