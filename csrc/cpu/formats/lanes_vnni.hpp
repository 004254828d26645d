// Vectors of products with packed weights for AVX-512 with VNNI. In an unnamed namespace, see
// span_impl.hpp.
#pragma once

#include <stdint.h>

#include "../decoder_kernels.hpp"
#include "../lanes_avx512.hpp"

namespace pipespec::cpu {
namespace {

struct Vnni : Avx512 {
  using Bytes = __m512i;
  using Avx512::add;
  using Avx512::multiply;
  static constexpr bool kSignedBytes = false;

  template <int64_t kBytes>
  static void prefetch(const unsigned char* p) {
    // Keeps gcc from moving those of a whole block to its beginning, where they wait for each
    // other.
    asm volatile("");
#pragma GCC unroll 64
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(p + kPrefetchBytes + i);
  }
  static Bytes load_bytes(const unsigned char* p) { return _mm512_load_si512(p); }
  static I load_words(const unsigned char* p) { return _mm512_load_si512(p); }
  static F half(const unsigned char* p) { return Float16::load(p); }
  // (x >> kBy) & kMask of each byte
  template <int kBy, int kMask>
  static Bytes bits(Bytes x) {
    return _mm512_and_si512(kBy == 0 ? x : _mm512_srli_epi16(x, kBy), _mm512_set1_epi8(kMask));
  }
  // y | ((x >> kBy) & kMask) of each byte
  template <int kBy, int kMask>
  static Bytes or_bits(Bytes y, Bytes x) {
    if constexpr (kBy > 0) x = _mm512_srli_epi16(x, kBy);
    if constexpr (kBy < 0) x = _mm512_slli_epi16(x, -kBy);
    return _mm512_ternarylogic_epi32(y, x, _mm512_set1_epi8(kMask), 0xF8);
  }
  // A table of 16 bytes, and its entries at `places`.
  static Bytes load_table(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
  static Bytes lookup(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
  static I bytes_as_words(const unsigned char* p) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Bytes with signs at even, or odd places, in 16 bits.
  static I even_bytes(I x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
  static I odd_bytes(I x) { return _mm512_srai_epi16(x, 8); }
  static I larger(I a, I b) { return _mm512_max_epi32(a, b); }
  static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I multiply(I a, I b) { return _mm512_mullo_epi32(a, b); }
  // Adds to each lane the products of kCount vectors of codes with 4 kCount inputs.
  template <int kBits, int kCount>
  static I dots(I sum, const Bytes* codes, const int8_t* x) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i)
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes[i]), "m"(four(x + 4 * i)));
    return sum;
  }
  // Adds to each lane 2 words times 2 inputs.
  static I dot16(I sum, I words, const int16_t* x) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(words), "m"(four(x)));
    return sum;
  }

 private:
  // The compiler would load the inputs by an instruction of its own.
  typedef int32_t Four __attribute__((may_alias, aligned(1)));
  static const Four& four(const void* x) { return *static_cast<const Four*>(x); }
};

}  // namespace
}  // namespace pipespec::cpu
