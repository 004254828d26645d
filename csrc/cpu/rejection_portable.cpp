// Kernels of rejection sampling for any CPU.
#include "lanes_portable.hpp"
#include "rejection_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RejectionKernels kKernels = {kOfFormat<Portable, Float32>, kOfFormat<Portable, BFloat16>,
                                       kOfFormat<Portable, Float16>};

}  // namespace

const RejectionKernels* portable_rejection() { return &kKernels; }

}  // namespace pipespec::cpu
