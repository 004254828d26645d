// The ratio test's kernels for AVX2 (with F16C).
#include "ratio_span.hpp"

#ifdef __AVX2__
#include "lanes_avx2.hpp"
#include "ratio_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RatioKernels kKernels = {kOfFormat<Avx2, Float32>, kOfFormat<Avx2, BFloat16>,
                                   kOfFormat<Avx2, Float16>};

}  // namespace

const RatioKernels* avx2_ratio() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const RatioKernels* avx2_ratio() { return nullptr; }
}  // namespace pipespec::cpu
#endif
