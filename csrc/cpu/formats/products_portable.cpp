// Products with packed weights for any CPU.
#include "../lanes_portable.hpp"
#include "packed.hpp"
//
#include "products_impl.hpp"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pipespec::cpu {
namespace {

struct PackedPortable : Portable {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint16_t Pairs __attribute__((vector_size(16)));
  typedef int16_t Words __attribute__((vector_size(16)));
  using Portable::add;
  using Portable::multiply;
  static constexpr bool kSignedBytes = false;

  template <int64_t kBytes>
  static void prefetch(const unsigned char*) {}
  static Bytes load_bytes(const unsigned char* p) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static I load_words(const unsigned char* p) { return I(load_bytes(p)); }
  static F half(const unsigned char* p) { return Float16::load(p); }
  template <int kBy, int kMask>
  static Bytes bits(Bytes x) {
    return x >> kBy & uint8_t(kMask);
  }
  template <int kBy, int kMask>
  static Bytes or_bits(Bytes y, Bytes x) {
    if constexpr (kBy >= 0)
      return y | (x >> kBy & uint8_t(kMask));
    else
      return y | (x << -kBy & uint8_t(kMask));
  }
  static Bytes load_table(const uint8_t* table) { return load_bytes(table); }
  static Bytes lookup(Bytes table, Bytes places) {
    Bytes found;
    for (int i = 0; i < 16; ++i) found[i] = table[places[i]];
    return found;
  }
  static I bytes_as_words(const unsigned char* p) { return I{p[0], p[1], p[2], p[3]}; }
  static I even_bytes(I x) { return I(Words(x) << 8 >> 8); }
  static I odd_bytes(I x) { return I(Words(x) >> 8); }
  static I larger(I a, I b) { return a > b ? a : b; }
  static I bit_or(I a, I b) { return a | b; }
  static I add(I a, I b) { return a + b; }
  static I multiply(I a, I b) { return a * b; }
  template <int kBits, int kCount>
  static I dots(I sum, const Bytes* codes, const int8_t* x) {
    for (int i = 0; i < kCount; ++i, x += 4) {
      const int16_t even[2] = {x[0], x[2]}, odd[2] = {x[1], x[3]};
      const Pairs pairs = Pairs(codes[i]);
      sum = dot16(dot16(sum, I(pairs & 255), even), I(pairs >> 8), odd);
    }
    return sum;
  }
  static I dot16(I sum, I words, const int16_t* x) {
#if defined(__SSE2__)
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    return sum + I(_mm_madd_epi16(__m128i(words), _mm_set1_epi32(two)));
#else
    return sum + (words << 16 >> 16) * int32_t{x[0]} + (words >> 16) * int32_t{x[1]};
#endif
  }
};

constexpr PackedKernels kKernels = packed_table<PackedPortable>("portable");

}  // namespace

const PackedKernels* portable_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
