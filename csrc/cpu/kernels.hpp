// The inner kernels, one table per instruction set. Each set has its own translation unit
// (kernels_portable.cpp, kernels_avx2.cpp, kernels_avx512.cpp, kernels_neon.cpp). Files compiled
// with -mavx512* include this header and those below, so they include nothing with inline
// functions: the linker could otherwise keep the AVX-512 copy of such a function for all callers.
#pragma once

#include "coupled.hpp"
#include "decoder_kernels.hpp"
#include "recurrent_kernels.hpp"
#include "span.hpp"

namespace pipespec::cpu {

struct Kernels {
  SpanKernels span;
  CoupledKernels coupled;
  DecoderKernels decoder;
  RecurrentKernels recurrent;
};

const Kernels* portable_kernels();
// For x86-64. Null where the compiler could not build the variant.
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const AttendKernels* bf16_attend_kernels();
// For 64-bit ARM.
const Kernels* neon_kernels();

// Those of the instructions in use (set_simd).
const Kernels& kernels();

}  // namespace pipespec::cpu
