// The inner kernels for AVX2 with F16C and FMA.
#include "kernels.hpp"

#ifdef __AVX2__
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx2.hpp"
//
#include "kernels_impl.hpp"

namespace pipespec::cpu {
namespace {

struct Avx2Vector {
  using Reg = __m256i;
  static Reg load(const unsigned char* p) {
    Reg x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    // Keeps the compiler from repeating the load for each use: rows in the L2 cache are read a
    // third faster.
    asm("" : "+x"(x));
    return x;
  }
  static void store(void* p, Reg x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static Reg bit_and(Reg a, Reg b) { return _mm256_and_si256(a, b); }
  static int first_byte(Reg mask) {
    const unsigned bits = unsigned(_mm256_movemask_epi8(mask));
    return bits == 0 ? -1 : __builtin_ctz(bits);
  }
};

struct V16 : Avx2Vector {
  using Lane = int16_t;
  static constexpr int kLanes = 16;
  static constexpr Lane kLowest = INT16_MIN, kHighest = INT16_MAX;
  static Reg broadcast(Lane x) { return _mm256_set1_epi16(x); }
  static Reg max_signed(Reg a, Reg b) { return _mm256_max_epi16(a, b); }
  static Reg min_signed(Reg a, Reg b) { return _mm256_min_epi16(a, b); }

  using Watch = Reg;  // unsigned maximum
  static Watch unseen() { return _mm256_setzero_si256(); }
  static Watch see(Watch w, Reg x, Reg) { return _mm256_max_epu16(w, x); }
  static Watch join(Watch a, Watch b) { return _mm256_max_epu16(a, b); }
  static bool saw_nan(Watch w, Reg neg_inf) {
    // AVX2 has no unsigned "greater": some lane is above where max(w, -inf) is not -inf.
    return unsigned(_mm256_movemask_epi8(
               _mm256_cmpeq_epi16(_mm256_max_epu16(w, neg_inf), neg_inf))) != 0xFFFFFFFFu;
  }
  static bool any_greater(Reg a, Reg b) { return first_byte(_mm256_cmpgt_epi16(a, b)) >= 0; }
  static int first_equal(Reg a, Reg b) { return first_byte(_mm256_cmpeq_epi16(a, b)) >> 1; }
  static int first_greater(Reg a, Reg b) { return first_byte(_mm256_cmpgt_epi16(a, b)) >> 1; }
};

struct V32 : Avx2Vector {
  using Lane = int32_t;
  static constexpr int kLanes = 8;
  static constexpr Lane kLowest = INT32_MIN, kHighest = INT32_MAX;
  static Reg broadcast(Lane x) { return _mm256_set1_epi32(x); }
  static Reg max_signed(Reg a, Reg b) { return _mm256_max_epi32(a, b); }
  static Reg min_signed(Reg a, Reg b) { return _mm256_min_epi32(a, b); }

  using Watch = Reg;  // unsigned maximum
  static Watch unseen() { return _mm256_setzero_si256(); }
  static Watch see(Watch w, Reg x, Reg) { return _mm256_max_epu32(w, x); }
  static Watch join(Watch a, Watch b) { return _mm256_max_epu32(a, b); }
  static bool saw_nan(Watch w, Reg neg_inf) {
    // AVX2 has no unsigned "greater": some lane is above where max(w, -inf) is not -inf.
    return unsigned(_mm256_movemask_epi8(
               _mm256_cmpeq_epi32(_mm256_max_epu32(w, neg_inf), neg_inf))) != 0xFFFFFFFFu;
  }
  static bool any_greater(Reg a, Reg b) { return first_byte(_mm256_cmpgt_epi32(a, b)) >= 0; }
  static int first_equal(Reg a, Reg b) { return first_byte(_mm256_cmpeq_epi32(a, b)) >> 2; }
  static int first_greater(Reg a, Reg b) { return first_byte(_mm256_cmpgt_epi32(a, b)) >> 2; }
};

struct DecoderAvx2 : Avx2 {
  static constexpr int kTileColumns = 3;

  // Keeps a sum in its register: left alone, the compiler moves some of them to the stack and back.
  static void pin(F& x) { asm("" : "+x"(x)); }

  static F sum_each(const F (&x)[kLanes]) { return sums_of_lanes<Avx2>(x); }

  struct Int8 {
    static constexpr int kBytes = 1;
    static F load(const unsigned char* p) {
      const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
    }
  };
};

constexpr Kernels kKernels = table<Avx2, V16, V32, DecoderAvx2>("avx2");

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
