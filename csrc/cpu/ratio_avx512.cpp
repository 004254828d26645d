// The ratio test's kernels for AVX-512 (F, BW, VL, DQ).
#include "ratio_span.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "lanes_avx512.hpp"
#include "ratio_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RatioKernels kKernels = {kOfFormat<Avx512, Float32>, kOfFormat<Avx512, BFloat16>,
                                   kOfFormat<Avx512, Float16>};

}  // namespace

const RatioKernels* avx512_ratio() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const RatioKernels* avx512_ratio() { return nullptr; }
}  // namespace pipespec::cpu
#endif
