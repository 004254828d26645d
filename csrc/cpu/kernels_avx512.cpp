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
  static constexpr int kAccumulators = 24;
  static constexpr int kMinPanels = 4;

  static void pin(F&) {}

  struct Weights8 {
    static constexpr int64_t kBytes = 1;
    static void load(const unsigned char* p, F (&w)[1]) {
      const __m128i x = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
      w[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
    }
  };
  struct Weights16 {
    static constexpr int64_t kBytes = 2;
    static void load(const unsigned char* p, F (&w)[1]) {
      const I x = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
      // Output i is the low half of word i, output i + 8 the high one; both go to high halves.
      const I from = _mm512_setr_epi32(0 << 16, 2 << 16, 4 << 16, 6 << 16, 8 << 16, 10 << 16,
                                       12 << 16, 14 << 16, 1 << 16, 3 << 16, 5 << 16, 7 << 16,
                                       9 << 16, 11 << 16, 13 << 16, 15 << 16);
      w[0] = float_of(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, from, x));
    }
  };
  struct Weights32 {
    static constexpr int64_t kBytes = 4;
    static void load(const unsigned char* p, F (&w)[1]) { w[0] = Float32::load(p); }
  };
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
