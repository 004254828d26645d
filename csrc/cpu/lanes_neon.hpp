// Vectors and formats of logits for NEON with fused multiply-add, which every 64-bit ARM processor
// has: those for any CPU, and what the compiler does not find by itself. In an unnamed namespace,
// see span_impl.hpp.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "lanes_portable.hpp"

namespace pipespec::cpu {
namespace {

struct Neon : Portable {
  // Of a product in registers, of which there are 32.
  static constexpr int kTileQueries = 4, kTileVectors = 4;
  using Portable::multiply;

  // May round once or twice: for filters only.
  static F multiply_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fraction(F d) { return d - F(vrndnq_f32(d)); }
  static F scale(F y, F d, F fraction) {
    return y * F(shift_left<23>(I(vcvtnq_s32_f32(d - fraction)) + 127));
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(I (&x)[4]) {
    const int32x4_t even = vtrn1q_s32(x[0], x[1]), odd = vtrn2q_s32(x[0], x[1]);
    const int32x4_t even2 = vtrn1q_s32(x[2], x[3]), odd2 = vtrn2q_s32(x[2], x[3]);
    x[0] = low_halves(even, even2), x[1] = low_halves(odd, odd2);
    x[2] = high_halves(even, even2), x[3] = high_halves(odd, odd2);
  }

  static bool any(Mask a, Mask b) { return vmaxvq_u32(U(a | b)) != 0; }
  static W multiply(W a, W b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }

 private:
  static I low_halves(int32x4_t a, int32x4_t b) {
    return I(vtrn1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
  static I high_halves(int32x4_t a, int32x4_t b) {
    return I(vtrn2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
  }
};

}  // namespace
}  // namespace pipespec::cpu
