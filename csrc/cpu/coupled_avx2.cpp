// Coupled selection for AVX2 (with F16C).
#include "coupled.hpp"

#ifdef __AVX2__
#include "coupled_impl.hpp"
#include "lanes_avx2.hpp"

namespace pipespec::cpu {
namespace {

constexpr CoupledKernels kKernels = {
    coupled_select<Avx2, Float32>,
    coupled_select<Avx2, BFloat16>,
    coupled_select<Avx2, Float16>,
    noise_span<Avx2>,
};

}  // namespace

const CoupledKernels* avx2_coupled() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const CoupledKernels* avx2_coupled() { return nullptr; }
}  // namespace pipespec::cpu
#endif
