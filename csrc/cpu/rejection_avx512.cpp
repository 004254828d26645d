// Kernels of rejection sampling for AVX-512 (F, BW, VL, DQ).
#include "rejection_span.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "lanes_avx512.hpp"
#include "rejection_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RejectionKernels kKernels = {kOfFormat<Avx512, Float32>, kOfFormat<Avx512, BFloat16>,
                                       kOfFormat<Avx512, Float16>};

}  // namespace

const RejectionKernels* avx512_rejection() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const RejectionKernels* avx512_rejection() { return nullptr; }
}  // namespace pipespec::cpu
#endif
