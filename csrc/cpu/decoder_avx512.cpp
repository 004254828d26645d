// Decoder kernels for AVX-512 (F, BW, VL, DQ).
#include "decoder_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx512.hpp"
//
#include "decoder_impl.hpp"

namespace pipespec::cpu {
namespace {

struct DecoderAvx512 : Avx512 {
  static constexpr int kAccumulators = 24;
  static constexpr int kLeastPanels = 4;

  static void pin(F&) {}
  static F divide(F a, F b) { return _mm512_div_ps(a, b); }
  static __m256 halves(F x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  }
  static __m256 sum_eight(const F* x) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(halves(x[0]), halves(x[1])),
                                      _mm256_hadd_ps(halves(x[2]), halves(x[3])));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(halves(x[4]), halves(x[5])),
                                       _mm256_hadd_ps(halves(x[6]), halves(x[7])));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                         _mm256_permute2f128_ps(low, high, 0x31));
  }
  // Lane i: the sum of the lanes of x[i].
  static F sum_each(const F (&x)[16]) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(sum_eight(x)), sum_eight(x + 8), 1);
  }

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

constexpr DecoderKernels kKernels = decoder_table<DecoderAvx512>();

}  // namespace

const DecoderKernels* avx512_decoder() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const DecoderKernels* avx512_decoder() { return nullptr; }
}  // namespace pipespec::cpu
#endif
