// Vectors and formats of logits for AVX2 (with F16C), for coupled_impl.hpp and decoder_impl.hpp.
// In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace pipespec::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  using W = __m256i;
  using Mask = __m256;
  static constexpr int kLanes = 8;
  // Of a product in registers.
  static constexpr int kTileQueries = 3, kTileVectors = 4;

  static F broadcast(float x) { return _mm256_set1_ps(x); }
  static I broadcast(int32_t x) { return _mm256_set1_epi32(x); }
  static W broadcast64(uint64_t x) { return _mm256_set1_epi64x(int64_t(x)); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F subtract(F a, F b) { return _mm256_sub_ps(a, b); }
  static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
  static F divide(F a, F b) { return _mm256_div_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F where_less(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  // May round once or twice: for filters only.
  static F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add_unless_less(F sum, F x, F bar, F y) {
    return _mm256_add_ps(sum, _mm256_and_ps(y, _mm256_cmp_ps(x, bar, _CMP_NLT_UQ)));
  }
  // The steps of 2^d, d within -120 .. 64: d minus the nearest integer; y times two to the power of
  // that integer.
  static F fraction(F d) {
    return _mm256_sub_ps(d, _mm256_round_ps(d, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F scale(F y, F d, F fraction) {
    const I whole = _mm256_cvtps_epi32(_mm256_sub_ps(d, fraction));
    return _mm256_mul_ps(
        y, float_of(shift_left<23>(_mm256_add_epi32(whole, broadcast(int32_t{127})))));
  }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I bits_of(F x) { return _mm256_castps_si256(x); }
  static F float_of(I x) { return _mm256_castsi256_ps(x); }
  static I subtract(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  template <int kBy>
  static I shift_left(I x) {
    return _mm256_slli_epi32(x, kBy);
  }
  template <int kBy>
  static I shift_right(I x) {
    return _mm256_srli_epi32(x, kBy);
  }
  template <int kBy>
  static I shift_right_signed(I x) {
    return _mm256_srai_epi32(x, kBy);
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(I (&x)[8]) {
    I y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
      x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
      x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
      x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const I low = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
      x[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
      x[i] = low;
    }
  }

  static Mask not_less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
  static Mask not_at_most(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_NLE_UQ); }
  static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static bool any(Mask a, Mask b) { return bits(_mm256_or_ps(a, b)) != 0; }
  static unsigned bits(Mask a) { return unsigned(_mm256_movemask_ps(a)); }

  // Of the counters, the low 128 bits hold 0 and 1 at their even place: interleaving within 128
  // bits then leaves the words in order.
  static W counters(uint32_t first) {
    return _mm256_add_epi64(broadcast64(first), _mm256_setr_epi64x(0, 2, 1, 3));
  }
  static W multiply(W a, W b) { return _mm256_mul_epu32(a, b); }
  static W high_half(W a) { return _mm256_srli_epi64(a, 32); }
  static W bit_xor(W a, W b) { return _mm256_xor_si256(a, b); }
  static W bit_xor3(W a, W b, W c) { return bit_xor(a, bit_xor(b, c)); }
  static void interleave(W c0, W c1, W c2, W c3, I& r0, I& r1) {
    const W a = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
    const W b = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
    r0 = _mm256_unpacklo_epi64(a, b);
    r1 = _mm256_unpackhi_epi64(a, b);
  }
};

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kMinusInf = 0xFF800000u;
  static __m256 load(const unsigned char* p) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFF80;
  static __m256 load(const unsigned char* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFC00;
  static __m256 load(const unsigned char* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

}  // namespace
}  // namespace pipespec::cpu
