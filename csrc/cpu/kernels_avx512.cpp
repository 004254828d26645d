// The inner kernels for AVX-512 (F, BW, VL, DQ).
#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
// gcc 12 takes the deliberate `__m512i y = y` of its own header for a mistake (GCC PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx512.hpp"
//
#include "kernels_impl.hpp"

namespace pipespec::cpu {
namespace {

struct Avx512Vector {
  using Reg = __m512i;
  static Reg load(const unsigned char* p) {
    Reg x = _mm512_loadu_si512(p);
    // Keeps the compiler from repeating the load for each use: rows in the L2 cache are read a
    // third faster.
    asm("" : "+v"(x));
    return x;
  }
  static void store(void* p, Reg x) { _mm512_storeu_si512(p, x); }
  static Reg bit_and(Reg a, Reg b) { return _mm512_and_si512(a, b); }
  static int first_bit(unsigned mask) { return mask == 0 ? -1 : __builtin_ctz(mask); }
};

struct V16 : Avx512Vector {
  using Lane = int16_t;
  static constexpr int kLanes = 32;
  static constexpr Lane kLowest = INT16_MIN, kHighest = INT16_MAX;
  static Reg broadcast(Lane x) { return _mm512_set1_epi16(x); }
  static Reg max_signed(Reg a, Reg b) { return _mm512_max_epi16(a, b); }
  static Reg min_signed(Reg a, Reg b) { return _mm512_min_epi16(a, b); }

  // Lanes that have seen no NaN with a sign bit. This is a compare: one execution port alone runs
  // maxima, and the maximum above occupies it.
  using Watch = __mmask32;
  static Watch unseen() { return __mmask32(-1); }
  static Watch see(Watch w, Reg x, Reg neg_inf) {
    return _mm512_mask_cmple_epu16_mask(w, x, neg_inf);
  }
  static Watch join(Watch a, Watch b) { return a & b; }
  static bool saw_nan(Watch w, Reg) { return w != __mmask32(-1); }
  static bool any_greater(Reg a, Reg b) { return _mm512_cmpgt_epi16_mask(a, b) != 0; }
  static int first_equal(Reg a, Reg b) { return first_bit(_mm512_cmpeq_epi16_mask(a, b)); }
  static int first_greater(Reg a, Reg b) { return first_bit(_mm512_cmpgt_epi16_mask(a, b)); }
};

struct V32 : Avx512Vector {
  using Lane = int32_t;
  static constexpr int kLanes = 16;
  static constexpr Lane kLowest = INT32_MIN, kHighest = INT32_MAX;
  static Reg broadcast(Lane x) { return _mm512_set1_epi32(x); }
  static Reg max_signed(Reg a, Reg b) { return _mm512_max_epi32(a, b); }
  static Reg min_signed(Reg a, Reg b) { return _mm512_min_epi32(a, b); }

  // Lanes that have seen no NaN with a sign bit. This is a compare: one execution port alone runs
  // maxima, and the maximum above occupies it.
  using Watch = __mmask16;
  static Watch unseen() { return __mmask16(-1); }
  static Watch see(Watch w, Reg x, Reg neg_inf) {
    return _mm512_mask_cmple_epu32_mask(w, x, neg_inf);
  }
  static Watch join(Watch a, Watch b) { return a & b; }
  static bool saw_nan(Watch w, Reg) { return w != __mmask16(-1); }
  static bool any_greater(Reg a, Reg b) { return _mm512_cmpgt_epi32_mask(a, b) != 0; }
  static int first_equal(Reg a, Reg b) { return first_bit(_mm512_cmpeq_epi32_mask(a, b)); }
  static int first_greater(Reg a, Reg b) { return first_bit(_mm512_cmpgt_epi32_mask(a, b)); }
};

struct DecoderAvx512 : Avx512 {
  static constexpr int kTileColumns = 6;

  static void pin(F&) {}

  // What sums_of_lanes computes, with half as many moves. Each step adds halves of the vectors of
  // two outputs, until lane 4 i + j is the sum of output 4 i + j.
  static F sum_each(const F (&x)[16]) {
    F of_four[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      of_four[j] = add_quarters(add_halves(x[j], x[4 + j]), add_halves(x[8 + j], x[12 + j]));
    return add_words(add_pairs(of_four[0], of_four[1]), add_pairs(of_four[2], of_four[3]));
  }

  struct Int8 {
    static constexpr int kBytes = 1;
    static F load(const unsigned char* p) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
    }
  };

 private:
  static F add_halves(F a, F b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  static F add_quarters(F a, F b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  static F add_pairs(F a, F b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
               _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  static F add_words(F a, F b) {
    return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
  }
};

constexpr Kernels kKernels = table<Avx512, V16, V32, DecoderAvx512>("avx512");

}  // namespace

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
