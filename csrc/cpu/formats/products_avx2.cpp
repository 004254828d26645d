// Products with packed weights for AVX2.
#include "../decoder_kernels.hpp"
#include "packed.hpp"

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include "../lanes_avx2.hpp"
//
#include "products_impl.hpp"

namespace pipespec::cpu {
namespace {

struct PackedAvx2 : Avx2 {
  using Bytes = __m256i;
  using Avx2::add;
  using Avx2::multiply;
  static constexpr bool kSignedBytes = true;

  template <int64_t kBytes>
  static void prefetch(const unsigned char* p) {
#pragma GCC unroll 64
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(p + kPrefetchBytes + i);
  }
  static Bytes load_bytes(const unsigned char* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I load_words(const unsigned char* p) { return load_bytes(p); }
  static F half(const unsigned char* p) { return Float16::load(p); }
  template <int kBy, int kMask>
  static Bytes bits(Bytes x) {
    return _mm256_and_si256(kBy == 0 ? x : _mm256_srli_epi16(x, kBy), _mm256_set1_epi8(kMask));
  }
  template <int kBy, int kMask>
  static Bytes or_bits(Bytes y, Bytes x) {
    if constexpr (kBy > 0) x = _mm256_srli_epi16(x, kBy);
    if constexpr (kBy < 0) x = _mm256_slli_epi16(x, -kBy);
    return _mm256_or_si256(y, _mm256_and_si256(x, _mm256_set1_epi8(kMask)));
  }
  static Bytes load_table(const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
  static Bytes lookup(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
  static I bytes_as_words(const unsigned char* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I even_bytes(I x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
  static I odd_bytes(I x) { return _mm256_srai_epi16(x, 8); }
  static I larger(I a, I b) { return _mm256_max_epi32(a, b); }
  static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I multiply(I a, I b) { return _mm256_mullo_epi32(a, b); }
  // Adds to each lane the products of kCount vectors of codes with 4 kCount inputs. Pairs of
  // products are added up in 16 bits as long as they fit: inputs are -127 .. 127, codes are less
  // than 2^kBits; those of 8 bits are taken with their sign.
  template <int kBits, int kCount>
  static I dots(I sum, const Bytes* codes, const int8_t* x) {
    constexpr int kFit = kBits <= 4 ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;
    constexpr int kGroup = kFit < kCount ? kFit : kCount;
    static_assert(kGroup * 2 * 127 * ((1 << kBits) - 1) <= 32767 || kBits == 8);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += kGroup) {
      __m256i pairs = pair_products<kBits>(codes[i], x + 4 * i);
#pragma GCC unroll 8
      for (int j = i + 1; j < i + kGroup; ++j)
        pairs = _mm256_add_epi16(pairs, pair_products<kBits>(codes[j], x + 4 * j));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
  }
  static I dot16(I sum, I words, const int16_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi32(two)));
  }

 private:
  template <int kBits>
  static __m256i pair_products(Bytes codes, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    __m256i inputs = _mm256_set1_epi32(four);
    if constexpr (kBits == 8) {
      const __m256i weights = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
      inputs = _mm256_sign_epi8(inputs, weights);
      codes = _mm256_abs_epi8(weights);
    }
    return _mm256_maddubs_epi16(codes, inputs);
  }
};

constexpr PackedKernels kKernels = packed_table<PackedAvx2>("avx2");

}  // namespace

const PackedKernels* avx2_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const PackedKernels* avx2_packed_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
