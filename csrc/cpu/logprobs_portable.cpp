// Kernels of log-probabilities for any CPU.
#include "lanes_portable.hpp"
//
#include "logprobs_impl.hpp"

namespace pipespec::cpu {

const LogprobKernels* portable_logprobs() { return &kLogprobKernels<Portable>; }

}  // namespace pipespec::cpu
