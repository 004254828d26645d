// Kernels of log-probabilities for AVX-512 (F, BW, VL, DQ).
#include "logprobs_span.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx512.hpp"
//
#include "logprobs_impl.hpp"

namespace pipespec::cpu {

const LogprobKernels* avx512_logprobs() { return &kLogprobKernels<Avx512>; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const LogprobKernels* avx512_logprobs() { return nullptr; }
}  // namespace pipespec::cpu
#endif
