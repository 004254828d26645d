// The algorithm behind coupled.hpp, written once over a small vector type. Included by
// kernels_impl.hpp and by nothing else; everything is in an unnamed namespace (see span_impl.hpp).
//
// The noise of a logit costs ten times as much as the logit itself, and nearly every id can be
// excluded without its noise. Three exact filters, each cheaper than the next, for a group of two
// vectors:
//   1. logits below the cutoff, or that could not win with the largest noise there is: no random
//      numbers at all;
//   2. random numbers whose upper bound (gumbel.hpp) does not reach the best so far: no logarithms;
//   3. the remaining vectors, a few tens per row, are computed and compared.
// "Exact": the bounds hold for the rounded numbers, as rounding is monotone, so the result is bit
// for bit that of computing everything.
//
// A vector type V has 32-bit lanes (V::F float, V::I integer) and 64-bit lanes (V::W) in registers
// of one size. Philox runs one counter per 64-bit lane, the word in its low half. The high half may
// hold anything, because the multiplication reads low halves only.
#pragma once

#include <stdint.h>

#include "../protocol/gumbel.hpp"
#include "../protocol/philox.hpp"
#include "coupled.hpp"

namespace pipespec::cpu {
namespace {

inline float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline Packed pack(float value, int64_t index) {
  uint32_t bits = bits_of_float(value);
  if (value == 0) bits = 0;  // of either sign
  const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return Packed(value == value ? order : kNanOrder) << 32 | uint32_t(~uint32_t(index));
}

// The random numbers of a row.
template <class V>
class Random {
 public:
  Random(uint64_t seed, uint64_t position, uint32_t stream)
      : position_(V::broadcast64(uint32_t(position))), stream_(V::broadcast64(stream)) {
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int i = 0; i < philox::kRounds; ++i) {
      key_[i][0] = V::broadcast64(key0);
      key_[i][1] = V::broadcast64(key1);
      key0 += philox::kWeyl0;
      key1 += philox::kWeyl1;
    }
    high_ = V::broadcast64(uint32_t(position >> 32));
    // The first round's second product depends on the position only.
    const auto b = V::multiply(high_, V::broadcast64(philox::kMultiplier1));
    first0_ = V::bit_xor(V::high_half(b), V::bit_xor(position_, key_[0][0]));
    first1_ = b;
    // So does the second round's first.
    const auto a = V::multiply(first0_, V::broadcast64(philox::kMultiplier0));
    second2_ = V::bit_xor(V::high_half(a), key_[1][1]);
    second3_ = a;
    mix_ = V::bit_xor(stream_, key_[0][1]);
  }

  // Of the ids 4 * group .. 4 * group + 2 * kLanes - 1, in order.
  void get(uint32_t group, typename V::I& r0, typename V::I& r1) const {
    const auto m0 = V::broadcast64(philox::kMultiplier0);
    const auto m1 = V::broadcast64(philox::kMultiplier1);
    // Round 0 and 1, as far as they depend on the id.
    const auto a = V::multiply(V::counters(group), m0);
    const auto b = V::multiply(V::bit_xor(V::high_half(a), mix_), m1);
    auto c0 = V::bit_xor3(V::high_half(b), first1_, key_[1][0]);
    auto c1 = b;
    auto c2 = V::bit_xor(second2_, a);
    auto c3 = second3_;
    for (int i = 2; i < philox::kRounds; ++i) {
      const auto p = V::multiply(c0, m0);
      const auto q = V::multiply(c2, m1);
      c0 = V::bit_xor3(V::high_half(q), c1, key_[i][0]);
      c1 = q;
      c2 = V::bit_xor3(V::high_half(p), c3, key_[i][1]);
      c3 = p;
    }
    V::interleave(c0, c1, c2, c3, r0, r1);
  }

 private:
  typename V::W key_[philox::kRounds][2];
  typename V::W position_, high_, stream_, first0_, first1_, second2_, second3_, mix_;
};

template <class V>
inline typename V::F lg2(typename V::F x) {
  const auto bits = V::bits_of(x);
  const auto exponent =
      V::template shift_right_signed<23>(V::subtract(bits, V::broadcast(noise::kSqrtHalfBits)));
  const auto mantissa = V::float_of(V::subtract(bits, V::template shift_left<23>(exponent)));
  const auto t = V::add(mantissa, V::broadcast(-1.0f));
  auto p = V::broadcast(noise::kP6);
  const float coefficients[] = {noise::kP5, noise::kP4, noise::kP3,
                                noise::kP2, noise::kP1, noise::kP0};
  for (const float c : coefficients) p = V::add(V::multiply(p, t), V::broadcast(c));
  return V::add(V::to_float(exponent), V::multiply(t, p));
}

template <class V>
inline typename V::F gumbel(typename V::I r) {
  const auto high =
      V::multiply(V::to_float(V::template shift_right<16>(r)), V::broadcast(noise::kPerHighHalf));
  const auto low =
      V::add(V::to_float(V::bit_and(r, V::broadcast(int32_t{0xFFFF}))), V::broadcast(0.5f));
  const auto u = V::add(high, V::multiply(low, V::broadcast(noise::kPerUnit)));
  const auto one = V::broadcast(1.0f);
  const auto small = V::multiply(u, V::add(one, V::multiply(u, V::broadcast(0.5f))));
  const auto rest = V::max(V::subtract(one, u), V::broadcast(noise::kMinRest));
  const auto minus_ln2 = V::broadcast(-noise::kLn2);
  const auto large = V::multiply(minus_ln2, lg2<V>(rest));
  const auto e = V::where_less(u, V::broadcast(noise::kSmallU), small, large);
  return V::multiply(minus_ln2, lg2<V>(e));
}

template <class V>
inline typename V::F gumbel_bound(typename V::I r) {
  const auto f = V::to_float(V::template shift_right<1>(r));
  return V::subtract(V::broadcast(noise::kBoundOffset),
                     V::multiply(V::broadcast(noise::kBoundSlope), V::to_float(V::bits_of(f))));
}

template <class V>
void noise_span(uint64_t seed, uint64_t position, uint32_t stream, int64_t begin, int64_t n,
                float* out) {
  constexpr int64_t kGroup = 2 * V::kLanes;
  const Random<V> random(seed, position, stream);
  const int64_t end = begin + n;
  for (int64_t i = begin / 4 * 4; i < end; i += kGroup) {
    typename V::I r0, r1;
    random.get(uint32_t(i / 4), r0, r1);
    float lanes[kGroup];
    V::store(lanes, gumbel<V>(r0));
    V::store(lanes + V::kLanes, gumbel<V>(r1));
    for (int64_t j = 0; j < kGroup; ++j) {
      if (i + j >= begin && i + j < end) out[i + j - begin] = lanes[j];
    }
  }
}

// The two vectors at p, of which `left >= 1` elements exist: in place, or copied to `tail` and
// filled up with -inf.
template <class V, class Format>
inline const unsigned char* whole_group(const unsigned char* p, int64_t left, unsigned char* tail) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  if (left >= kGroup) return p;
  for (int64_t j = 0; j < kGroup; ++j)
    __builtin_memcpy(tail + j * kSize, &Format::kMinusInf, kSize);
  __builtin_memcpy(tail, p, size_t(left * kSize));
  return tail;
}

// The best of a row so far. It starts as -inf at the span's beginning, and only what is strictly
// better replaces it: -inf itself is never selected, and of equals the first stays.
template <class V>
struct Best {
  float value;
  int64_t index;
  typename V::F bar;

  // Tries the lanes `wanted` of the vector that begins at id `first`; true if a NaN ended the
  // search.
  bool take(unsigned wanted, typename V::F scaled, typename V::I r, int64_t first) {
    float lanes[V::kLanes];
    V::store(lanes, V::add(scaled, gumbel<V>(r)));
    for (; wanted != 0; wanted &= wanted - 1) {
      const int lane = __builtin_ctz(wanted);
      const float y = lanes[lane];
      if (y <= value) continue;
      value = y;
      index = first + lane;
      if (y != y) return true;
    }
    bar = V::broadcast(value);
    return false;
  }
};

template <class V, class Format>
Packed coupled_select(const CoupledRow& row, int64_t begin, int64_t n) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  const unsigned char* const data = static_cast<const unsigned char*>(row.data);
  const int64_t end = begin + n;
  const Random<V> random(row.seed, row.position, row.stream);
  const auto scale = V::broadcast(row.inv_temperature);
  const auto cutoff = V::broadcast(row.cutoff);
  const auto ceiling = V::broadcast(noise::kCeiling);

  Best<V> best;
  best.value = float_of_bits(0xFF800000u);
  best.index = begin;
  best.bar = V::broadcast(best.value);

  alignas(64) unsigned char tail[kGroup * kSize];
  for (int64_t i = begin; i < end; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, end - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    const auto s0 = V::multiply(x0, scale);
    const auto s1 = V::multiply(x1, scale);
    // Comparisons with a NaN are false, so a NaN passes every filter.
    auto m0 = V::both(V::not_less(x0, cutoff), V::not_at_most(V::add(s0, ceiling), best.bar));
    auto m1 = V::both(V::not_less(x1, cutoff), V::not_at_most(V::add(s1, ceiling), best.bar));
    if (!V::any(m0, m1)) continue;
    typename V::I r0, r1;
    random.get(uint32_t(i / 4), r0, r1);
    m0 = V::both(m0, V::not_at_most(V::add(s0, gumbel_bound<V>(r0)), best.bar));
    m1 = V::both(m1, V::not_at_most(V::add(s1, gumbel_bound<V>(r1)), best.bar));
    if (!V::any(m0, m1)) continue;
    if (best.take(V::bits(m0), s0, r0, i) || best.take(V::bits(m1), s1, r1, i + V::kLanes)) break;
  }
  return pack(best.value, best.index);
}

}  // namespace
}  // namespace pipespec::cpu
