// The ratio test's kernels for any CPU.
#include "lanes_portable.hpp"
#include "ratio_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr RatioKernels kKernels = {kOfFormat<Portable, Float32>, kOfFormat<Portable, BFloat16>,
                                   kOfFormat<Portable, Float16>};

}  // namespace

const RatioKernels* portable_ratio() { return &kKernels; }

}  // namespace pipespec::cpu
