// Vectors and formats of logits for AVX-512 (F, BW, VL, DQ), for coupled_impl.hpp and
// decoder_impl.hpp. In an unnamed namespace, see span_impl.hpp.
#pragma once

// gcc 12 takes the deliberate `__m512i y = y` of its own header for a mistake (GCC PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <stdint.h>

namespace pipespec::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using W = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  // Of a product in registers.
  static constexpr int kTileQueries = 6, kTileVectors = 4;

  static F broadcast(float x) { return _mm512_set1_ps(x); }
  static I broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  static W broadcast64(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F subtract(F a, F b) { return _mm512_sub_ps(a, b); }
  static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  static F divide(F a, F b) { return _mm512_div_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F where_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  // May round once or twice: for filters only.
  static F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add_unless_less(F sum, F x, F bar, F y) {
    return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, bar, _CMP_NLT_UQ), sum, y);
  }
  // The steps of 2^d, d within -120 .. 64: d minus the nearest integer; y times two to the power of
  // that integer.
  static F fraction(F d) { return _mm512_reduce_ps(d, _MM_FROUND_TO_NEAREST_INT); }
  static F scale(F y, F d, F fraction) { return _mm512_scalef_ps(y, _mm512_sub_ps(d, fraction)); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I bits_of(F x) { return _mm512_castps_si512(x); }
  static F float_of(I x) { return _mm512_castsi512_ps(x); }
  static I subtract(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  template <int kBy>
  static I shift_left(I x) {
    return _mm512_slli_epi32(x, kBy);
  }
  template <int kBy>
  static I shift_right(I x) {
    return _mm512_srli_epi32(x, kBy);
  }
  template <int kBy>
  static I shift_right_signed(I x) {
    return _mm512_srai_epi32(x, kBy);
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(I (&x)[16]) {
    I y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
      y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
      x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
      x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
      x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
      y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
      y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
      y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
      x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
      x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
      x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xDD);
    }
  }

  static Mask not_less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
  static Mask not_at_most(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static bool any(Mask a, Mask b) { return (a | b) != 0; }
  static unsigned bits(Mask a) { return a; }

  // Of the counters, each 128 bits hold one of the first four at their even place: interleaving
  // within 128 bits then leaves the words in order.
  static W counters(uint32_t first) {
    return _mm512_add_epi64(broadcast64(first), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static W multiply(W a, W b) { return _mm512_mul_epu32(a, b); }
  static W high_half(W a) { return _mm512_srli_epi64(a, 32); }
  static W bit_xor(W a, W b) { return _mm512_xor_si512(a, b); }
  static W bit_xor3(W a, W b, W c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  static void interleave(W c0, W c1, W c2, W c3, I& r0, I& r1) {
    const W a = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
    const W b = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
    r0 = _mm512_unpacklo_epi64(a, b);
    r1 = _mm512_unpackhi_epi64(a, b);
  }
};

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kMinusInf = 0xFF800000u;
  static __m512 load(const unsigned char* p) { return _mm512_loadu_ps(p); }
};

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFF80;
  static __m512 load(const unsigned char* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFC00;
  static __m512 load(const unsigned char* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

}  // namespace
}  // namespace pipespec::cpu
