// Attention over bfloat16 for AVX-512 with its BF16 instructions.
#include "kernels.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "lanes_avx512.hpp"
//
#include "attend_impl.hpp"

namespace pipespec::cpu {
namespace {

// Products of pairs. Their sums are float32; subnormal numbers count as zero.
struct PairSteps {
  using F = __m512;
  using I = __m512i;
  using Format = BFloat16;
  static constexpr int kStep = 2, kWord = 2;
  static constexpr bool kInPlace = false;

  static void split(I word, F (&to)[1]) { to[0] = _mm512_castsi512_ps(word); }
  static void join(const unsigned char* const (&rows)[2], int64_t n, F (&to)[2]) {
    const I low = _mm512_setr_epi32(0 | 32 << 16, 1 | 33 << 16, 2 | 34 << 16, 3 | 35 << 16,
                                    4 | 36 << 16, 5 | 37 << 16, 6 | 38 << 16, 7 | 39 << 16,
                                    8 | 40 << 16, 9 | 41 << 16, 10 | 42 << 16, 11 | 43 << 16,
                                    12 | 44 << 16, 13 | 45 << 16, 14 | 46 << 16, 15 | 47 << 16);
    const I high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const I a = part(rows[0], n), b = part(rows[1], n);
    to[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    to[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
  }
  static F spread(const float* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static F dot(F a, F b, F sum) { return _mm512_dpbf16_ps(sum, pairs(a), pairs(b)); }
  static void round(const float* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 32) {
      const __m512bh halves =
          _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
      __builtin_memcpy(to + i / 2, &halves, sizeof(halves));
    }
  }

 private:
  static __m512bh pairs(F x) {
    __m512bh y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return y;
  }
  static I part(const unsigned char* p, int64_t n) {
    if (n >= 32) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << n) - 1), p);
  }
};

constexpr AttendKernels kKernels = attend_kernels<Avx512, PairSteps>();

}  // namespace

const AttendKernels* bf16_attend_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const AttendKernels* bf16_attend_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
