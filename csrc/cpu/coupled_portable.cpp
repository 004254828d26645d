// Coupled selection for any CPU.
#include "coupled_impl.hpp"
#include "lanes_portable.hpp"

namespace pipespec::cpu {
namespace {

constexpr CoupledKernels kKernels = {
    coupled_select<Portable, Float32>,
    coupled_select<Portable, BFloat16>,
    coupled_select<Portable, Float16>,
    noise_span<Portable>,
};

}  // namespace

const CoupledKernels* portable_coupled() { return &kKernels; }

}  // namespace pipespec::cpu
