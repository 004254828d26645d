// Names in a profiler's timeline. Header-only NVTX of the toolkit: a load and a branch without a
// profiler, nothing where the toolkit has no NVTX.
#pragma once

#include <cstdint>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define PIPESPEC_NVTX
#endif

namespace pipespec::cuda {

// From here to the end of the scope this thread launches a step of `stage` of this width.
class Range {
 public:
#ifdef PIPESPEC_NVTX
  Range(const char* stage, std::uint32_t width) {
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = stage;
    range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT32;
    range.payload.uiValue = width;
    nvtxDomainRangePushEx(domain(), &range);
  }
  ~Range() { nvtxDomainRangePop(domain()); }
#else
  Range(const char*, std::uint32_t) {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
#ifdef PIPESPEC_NVTX
  static nvtxDomainHandle_t domain() {
    static const nvtxDomainHandle_t own = nvtxDomainCreateA("pipespec");
    return own;
  }
#endif
};

}  // namespace pipespec::cuda
