// Coupled selection for AVX-512 (F, BW, VL, DQ).
#include "coupled.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include "coupled_impl.hpp"
#include "lanes_avx512.hpp"

namespace pipespec::cpu {
namespace {

constexpr CoupledKernels kKernels = {
    coupled_select<Avx512, Float32>,
    coupled_select<Avx512, BFloat16>,
    coupled_select<Avx512, Float16>,
    noise_span<Avx512>,
};

}  // namespace

const CoupledKernels* avx512_coupled() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const CoupledKernels* avx512_coupled() { return nullptr; }
}  // namespace pipespec::cpu
#endif
