// Kernels of rejection sampling for AVX2 (with F16C).
#include "rejection_span.hpp"

#ifdef __AVX2__
#include "lanes_avx2.hpp"
#include "rejection_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RejectionKernels kKernels = {kOfFormat<Avx2, Float32>, kOfFormat<Avx2, BFloat16>,
                                       kOfFormat<Avx2, Float16>};

}  // namespace

const RejectionKernels* avx2_rejection() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const RejectionKernels* avx2_rejection() { return nullptr; }
}  // namespace pipespec::cpu
#endif
