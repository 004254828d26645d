// How the codes of a format become integers: as they are less an offset, or by a table of 16
// values. Products take codes as unsigned bytes, from which the offset is not subtracted yet. In an
// unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

#include "slice.hpp"

namespace pipespec::cpu {
namespace {

template <int kBits_, int kOffset_>
struct Plain {
  static constexpr int kBits = kBits_, kOffset = kOffset_;
  static constexpr int kByteBits = kBits;  // of the unsigned bytes of a product
  static constexpr float kFactor = 1.0f;

  static int value(uint8_t code) { return int(code) - kOffset; }
  template <class V>
  PIPESPEC_UNPACK static void unpack(const unsigned char* from, typename V::Bytes (&bytes)[8]) {
    Slice<kBits>::template unpack<V>(from, bytes);
  }
};

// Values are -kOffset .. 2^kByteBits - kOffset - 1; a weight is kFactor times its value and scale.
template <class Table>
struct Lookup {
  static constexpr int kBits = 4, kOffset = Table::kOffset, kByteBits = Table::kByteBits;
  static constexpr float kFactor = Table::kFactor;

  static int value(uint8_t code) { return Table::kValues[code]; }
  template <class V>
  PIPESPEC_UNPACK static void unpack(const unsigned char* from, typename V::Bytes (&bytes)[8]) {
    Slice<4>::template unpack<V>(from, bytes);
    const auto table = V::load_table(kTable.bytes);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) bytes[i] = V::lookup(table, bytes[i]);
  }

 private:
  struct alignas(16) Unsigned {
    uint8_t bytes[16];
    constexpr Unsigned() : bytes() {
      for (int i = 0; i < 16; ++i) bytes[i] = uint8_t(Table::kValues[i] + kOffset);
    }
  };
  static constexpr Unsigned kTable{};
};

struct Iq4Values {
  static constexpr int kOffset = 128, kByteBits = 8;
  static constexpr float kFactor = 1.0f;
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
};

// Floats of 4 bits (E2M1), doubled.
struct E2m1Values {
  static constexpr int kOffset = 16, kByteBits = 5;
  static constexpr float kFactor = 1.0f;
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

// The entries of the grids of GGUF's smaller types.
struct Iq3sValues {
  static constexpr int kOffset = 32, kByteBits = 6;
  static constexpr float kFactor = 1.0f;
  static constexpr int8_t kValues[16] = {1,  3,  5,  7,  9,  11,  13,  15,
                                         -1, -3, -5, -7, -9, -11, -13, -15};
};

struct Iq3xxsValues {
  static constexpr int kOffset = 32, kByteBits = 6;
  static constexpr float kFactor = 0.5f;
  static constexpr int8_t kValues[16] = {2,  6,  10,  14,  18,  22,  26,  31,
                                         -2, -6, -10, -14, -18, -22, -26, -31};
};

// Of IQ1_S and IQ1_M: -1, 0 or 1, and an eighth more or less. Of IQ2_XXS, IQ2_XS and IQ2_S.
struct Iq2Values {
  static constexpr int kOffset = 64, kByteBits = 7;
  static constexpr float kFactor = 0.125f;
  static constexpr int8_t kValues[16] = {1, 7, 8, 9, 25, 43, 0, 0, -1, -7, -8, -9, -25, -43, 0, 0};
};

}  // namespace
}  // namespace pipespec::cpu
