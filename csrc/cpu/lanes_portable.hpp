// Vectors and formats of logits for any CPU: 16 bytes that the compiler turns into SSE2, NEON or
// plain code. For span_impl.hpp, coupled_impl.hpp and decoder_impl.hpp. In an unnamed namespace,
// see span_impl.hpp.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {
namespace {

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint64_t W __attribute__((vector_size(16)));
  using Mask = I;  // all ones or all zeros per lane
  static constexpr int kLanes = 4;
  // Of a product in registers.
  static constexpr int kTileQueries = 2, kTileVectors = 4;

  static F broadcast(float x) { return F{x, x, x, x}; }
  static I broadcast(int32_t x) { return I{x, x, x, x}; }
  static W broadcast64(uint64_t x) { return W{x, x}; }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }

  static F add(F a, F b) { return a + b; }
  static F subtract(F a, F b) { return a - b; }
  static F multiply(F a, F b) { return a * b; }
  static F divide(F a, F b) { return a / b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F where_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  // May round once or twice: for filters only.
  static F multiply_add(F a, F b, F c) { return a * b + c; }
  static F add_unless_less(F sum, F x, F bar, F y) { return sum + F(I(y) & ~(x < bar)); }
  // The steps of 2^d, d within -120 .. 64: d minus the nearest integer; y times two to the power of
  // that integer.
  static F fraction(F d) { return d - (d + 0x1.8p+23f - 0x1.8p+23f); }
  static F scale(F y, F d, F fraction) {
    const I whole = I(d - fraction + 0x1.8p+23f);  // in the low bits
    return y * F(shift_left<23>(whole + 127));
  }
  static F to_float(I x) { return __builtin_convertvector(x, F); }
  static I bits_of(F x) { return I(x); }
  static F float_of(I x) { return F(x); }
  static I subtract(I a, I b) { return a - b; }
  static I bit_and(I a, I b) { return a & b; }
  template <int kBy>
  static I shift_left(I x) {
    return I(U(x) << kBy);
  }
  template <int kBy>
  static I shift_right(I x) {
    return I(U(x) >> kBy);
  }
  template <int kBy>
  static I shift_right_signed(I x) {
    return x >> kBy;
  }

  // x[i] lane j <-> x[j] lane i
  static void transpose(I (&x)[4]) {
    const I a = x[0], b = x[1], c = x[2], d = x[3];
    for (int i = 0; i < 4; ++i) x[i] = I{a[i], b[i], c[i], d[i]};
  }

  static Mask not_less(F a, F b) { return ~(a < b); }
  static Mask not_at_most(F a, F b) { return ~(a <= b); }
  static Mask both(Mask a, Mask b) { return a & b; }
  static bool any(Mask a, Mask b) {
    const W all = W(a | b);
    return (all[0] | all[1]) != 0;
  }
  static unsigned bits(Mask a) {
    return unsigned(a[0] & 1) | unsigned(a[1] & 2) | unsigned(a[2] & 4) | unsigned(a[3] & 8);
  }

  static W counters(uint32_t first) { return W{first, uint64_t{first} + 1}; }
  static W multiply(W a, W b) {
    return W{uint64_t{uint32_t(a[0])} * uint32_t(b[0]), uint64_t{uint32_t(a[1])} * uint32_t(b[1])};
  }
  static W high_half(W a) { return a >> 32; }
  static W bit_xor(W a, W b) { return a ^ b; }
  static W bit_xor3(W a, W b, W c) { return a ^ b ^ c; }
  static void interleave(W c0, W c1, W c2, W c3, I& r0, I& r1) {
    r0 = I(U{uint32_t(c0[0]), uint32_t(c1[0]), uint32_t(c2[0]), uint32_t(c3[0])});
    r1 = I(U{uint32_t(c0[1]), uint32_t(c1[1]), uint32_t(c2[1]), uint32_t(c3[1])});
  }
};

struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr uint32_t kMinusInf = 0xFF800000u;
  static Portable::F load(const unsigned char* p) {
    Portable::F x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
};

inline Portable::U load16(const unsigned char* p) {
  typedef uint16_t Half __attribute__((vector_size(8)));
  Half x;
  __builtin_memcpy(&x, p, sizeof(x));
  return __builtin_convertvector(x, Portable::U);
}

struct BFloat16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFF80;
  static Portable::F load(const unsigned char* p) { return Portable::F(load16(p) << 16); }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr uint16_t kMinusInf = 0xFC00;
  static Portable::F load(const unsigned char* p) {
    using U = Portable::U;
    const U h = load16(p);
    const U magnitude = (h & 0x7FFF) << 13;
    // Exponents are biased by 15 there and by 127 here; infinities and NaNs keep all ones.
    const U normal = magnitude + (112u << 23);
    const U special = magnitude + (224u << 23);
    // A subnormal number is 2^-14 times its fraction: subtract the implied one.
    const U subnormal = U(Portable::F(magnitude + (113u << 23)) - Portable::broadcast(0x1p-14f));
    const U finite = magnitude < (1u << 23) ? subnormal : normal;
    return Portable::F((magnitude >= (31u << 23) ? special : finite) | (h & 0x8000) << 16);
  }
};

struct Int8 {
  static constexpr int kBytes = 1;
  static Portable::F load(const unsigned char* p) {
    typedef int8_t Four __attribute__((vector_size(4)));
    Four x;
    __builtin_memcpy(&x, p, sizeof(x));
    return __builtin_convertvector(x, Portable::F);
  }
};

// Integer vectors for span_impl.hpp.
template <class LaneT, class ULaneT>
struct PortableVector {
  using Lane = LaneT;
  typedef LaneT Reg __attribute__((vector_size(16)));
  typedef ULaneT UReg __attribute__((vector_size(16)));
  static constexpr int kLanes = 16 / int(sizeof(Lane));
  static constexpr Lane kLowest = Lane(ULaneT(1) << (8 * sizeof(Lane) - 1));
  static constexpr Lane kHighest = Lane(~kLowest);

  static Reg load(const unsigned char* p) {
    Reg x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(void* p, Reg x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static Reg broadcast(Lane x) { return x - Reg{}; }
  static Reg max_signed(Reg a, Reg b) { return a > b ? a : b; }
  static Reg min_signed(Reg a, Reg b) { return a < b ? a : b; }

  using Watch = Reg;  // all ones where a NaN with a sign bit was
  static Watch unseen() { return Reg{}; }
  static Watch see(Watch w, Reg x, Reg neg_inf) { return w | Reg(UReg(x) > UReg(neg_inf)); }
  static Watch join(Watch a, Watch b) { return a | b; }
  static bool saw_nan(Watch w, Reg) { return any(w); }

  static Reg bit_and(Reg a, Reg b) { return a & b; }
  static bool any(Reg mask) {
    uint64_t half[2];
    __builtin_memcpy(half, &mask, sizeof(mask));
    return (half[0] | half[1]) != 0;
  }
  static int first(Reg mask) {
    if (!any(mask)) return -1;
    int i = 0;
    while (mask[i] == 0) ++i;
    return i;
  }
  static bool any_greater(Reg a, Reg b) { return any(Reg(a > b)); }
  static int first_equal(Reg a, Reg b) { return first(Reg(a == b)); }
  static int first_greater(Reg a, Reg b) { return first(Reg(a > b)); }
};

using V16 = PortableVector<int16_t, uint16_t>;
using V32 = PortableVector<int32_t, uint32_t>;

}  // namespace
}  // namespace pipespec::cpu
