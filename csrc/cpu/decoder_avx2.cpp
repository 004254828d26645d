// Decoder kernels for AVX2 with FMA.
#include "decoder_kernels.hpp"

#ifdef __AVX2__
// The formats of the lanes come before the algorithms that use them.
#include "lanes_avx2.hpp"
//
#include "decoder_impl.hpp"

namespace pipespec::cpu {
namespace {

struct DecoderAvx2 : Avx2 {
  static constexpr int kAccumulators = 12;
  static constexpr int kLeastPanels = 1;

  // Keeps a sum in its register: left alone, the compiler moves some of them to the stack and back.
  static void pin(F& x) { asm("" : "+x"(x)); }
  static F divide(F a, F b) { return _mm256_div_ps(a, b); }
  // Lane i: the sum of the lanes of x[i].
  static F sum_each(const F (&x)[8]) {
    const F low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const F high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                         _mm256_permute2f128_ps(low, high, 0x31));
  }

  struct Weights8 {
    static constexpr int64_t kBytes = 1;
    static void load(const unsigned char* p, F (&w)[2]) {
      for (int i = 0; i < 2; ++i) {
        const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
        w[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
      }
    }
  };
  struct Weights16 {
    static constexpr int64_t kBytes = 2;
    static void load(const unsigned char* p, F (&w)[2]) {
      I x = _mm256_load_si256(reinterpret_cast<const I*>(p));
      asm("" : "+x"(x));  // keeps the compiler from loading it twice, once for each half
      w[0] = float_of(shift_left<16>(x));
      w[1] = float_of(bit_and(x, broadcast(int32_t(0xFFFF0000))));
    }
  };
  struct Weights32 {
    static constexpr int64_t kBytes = 4;
    static void load(const unsigned char* p, F (&w)[2]) {
      w[0] = Float32::load(p);
      w[1] = Float32::load(p + 32);
    }
  };
};

constexpr DecoderKernels kKernels = decoder_table<DecoderAvx2>();

}  // namespace

const DecoderKernels* avx2_decoder() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const DecoderKernels* avx2_decoder() { return nullptr; }
}  // namespace pipespec::cpu
#endif
