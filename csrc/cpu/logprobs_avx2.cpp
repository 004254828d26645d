// Kernels of log-probabilities for AVX2 (with F16C).
#include "logprobs_span.hpp"

#ifdef __AVX2__
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx2.hpp"
//
#include "logprobs_impl.hpp"

namespace pipespec::cpu {

const LogprobKernels* avx2_logprobs() { return &kLogprobKernels<Avx2>; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const LogprobKernels* avx2_logprobs() { return nullptr; }
}  // namespace pipespec::cpu
#endif
