// Span kernels for AVX-512 (F, BW, VL, DQ).
#include "span.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
// gcc 12 takes the deliberate `__m512i y = y` of its own header for a mistake (GCC PR 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "span_impl.hpp"

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
  static Reg bit_xor(Reg a, Reg b) { return _mm512_xor_si512(a, b); }
  static int first_bit(unsigned mask) { return mask == 0 ? -1 : __builtin_ctz(mask); }
};

struct V16 : Avx512Vector {
  using Lane = int16_t;
  static constexpr int kLanes = 32;
  static constexpr Lane kLowest = INT16_MIN, kHighest = INT16_MAX;
  static Reg broadcast(Lane x) { return _mm512_set1_epi16(x); }
  static Reg max_signed(Reg a, Reg b) { return _mm512_max_epi16(a, b); }
  static Reg min_signed(Reg a, Reg b) { return _mm512_min_epi16(a, b); }

  // Lanes that have seen no NaN with a sign bit. A compare and not a maximum because the maximum
  // above already keeps the only port busy that has one.
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

  // Lanes that have seen no NaN with a sign bit. A compare and not a maximum because the maximum
  // above already keeps the only port busy that has one.
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

constexpr SpanKernels kKernels = {"avx512", span_argmax<V16>, span_argmax<V32>, span_read<V32>};

}  // namespace

const SpanKernels* avx512_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const SpanKernels* avx512_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
