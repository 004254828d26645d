// The algorithm behind span.hpp, written once over a small vector type. Included by
// kernels_impl.hpp; everything is in an unnamed namespace, so that no copy compiled for one
// instruction set can replace another's.
//
// Why integers: IEEE numbers of one sign order like their bit patterns, so no conversion is needed
// for any of the three dtypes. One pass keeps, per lane, the signed maximum of the raw bits (the
// largest value as soon as one sign bit is clear; above +inf it is a NaN) and whether it has seen a
// NaN with its sign bit set (as an unsigned number such a NaN is above -inf). Only where every sign
// bit is set, and nothing better was seen before, a second pass takes the signed minimum, which is
// the value nearest to zero. That makes two cheap operations per vector. With more, arithmetic
// would limit the speed on rows in the L2 cache.
//
// The span is cut in blocks. A block's maxima are first compared lane by lane with the best so far;
// only a block that may improve on it is reduced to a number, and only the last block that improved
// strictly is searched for the position, so the logits are read once and one block twice.
#pragma once

#include <stdint.h>

#include "span.hpp"

namespace pipespec::cpu {
namespace {

// The second read of a block hits L1 or L2, and the work at the end of a block is small against it
// (4 and 16 KiB measured slower).
constexpr int64_t kBlockBytes = 8192;
constexpr int64_t kAlign = 64;

template <class Lane>
inline Lane load_lane(const unsigned char* p) {
  Lane x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

template <class V>
struct Extremes {
  typename V::Reg smax;
  typename V::Watch watch;  // for NaNs with a sign bit

  void see(typename V::Reg x, typename V::Reg neg_inf) {
    smax = V::max_signed(smax, x);
    watch = V::see(watch, x, neg_inf);
  }
};

template <class V>
struct Minimum {
  typename V::Reg smin;

  void see(typename V::Reg x, typename V::Reg) { smin = V::min_signed(smin, x); }
};

// Passes the block of `n >= 1` lanes at p through four accumulators. The last vector overlaps the
// one before, so nothing outside the block is read. An element that is read twice changes neither
// maximum nor minimum.
template <class V, class Accumulator>
inline void see_block(Accumulator (&acc)[4], const unsigned char* p, int64_t n,
                      typename V::Reg neg_inf) {
  using Lane = typename V::Lane;
  constexpr int64_t kStep = V::kLanes * int64_t(sizeof(Lane));
  if (n < V::kLanes) {
    Lane buffer[V::kLanes];
    for (int64_t i = 0; i < V::kLanes; ++i) {
      buffer[i] = load_lane<Lane>(p + (i < n ? i : 0) * int64_t(sizeof(Lane)));
    }
    acc[0].see(V::load(reinterpret_cast<const unsigned char*>(buffer)), neg_inf);
    return;
  }
  const unsigned char* const end = p + n * int64_t(sizeof(Lane));
  for (; end - p >= 4 * kStep; p += 4 * kStep) {
    acc[0].see(V::load(p), neg_inf);
    acc[1].see(V::load(p + kStep), neg_inf);
    acc[2].see(V::load(p + 2 * kStep), neg_inf);
    acc[3].see(V::load(p + 3 * kStep), neg_inf);
  }
  for (; end - p >= kStep; p += kStep) acc[0].see(V::load(p), neg_inf);
  if (p != end) acc[1].see(V::load(end - kStep), neg_inf);
}

template <class V>
inline Extremes<V> scan_block(const unsigned char* p, int64_t n, typename V::Reg neg_inf) {
  const Extremes<V> none{V::broadcast(V::kLowest), V::unseen()};
  Extremes<V> acc[4] = {none, none, none, none};
  see_block<V>(acc, p, n, neg_inf);
  return {V::max_signed(V::max_signed(acc[0].smax, acc[1].smax),
                        V::max_signed(acc[2].smax, acc[3].smax)),
          V::join(V::join(acc[0].watch, acc[1].watch), V::join(acc[2].watch, acc[3].watch))};
}

template <class V>
inline typename V::Lane min_of_block(const unsigned char* p, int64_t n) {
  const Minimum<V> none{V::broadcast(V::kHighest)};
  Minimum<V> acc[4] = {none, none, none, none};
  see_block<V>(acc, p, n, none.smin);
  typename V::Lane lanes[V::kLanes];
  V::store(lanes, V::min_signed(V::min_signed(acc[0].smin, acc[1].smin),
                                V::min_signed(acc[2].smin, acc[3].smin)));
  typename V::Lane m = lanes[0];
  for (int i = 1; i < V::kLanes; ++i) m = lanes[i] < m ? lanes[i] : m;
  return m;
}

template <class V>
inline typename V::Lane max_of_lanes(typename V::Reg x) {
  typename V::Lane lanes[V::kLanes];
  V::store(lanes, x);
  typename V::Lane m = lanes[0];
  for (int i = 1; i < V::kLanes; ++i) m = lanes[i] > m ? lanes[i] : m;
  return m;
}

// Index of the first lane in the block that is a NaN (kNan) or has `(x & mask) == wanted`. The
// block contains one.
template <class V, bool kNan>
inline int64_t find_first(const unsigned char* p, int64_t n, typename V::Lane mask,
                          typename V::Lane wanted) {
  using Lane = typename V::Lane;
  const auto masks = V::broadcast(mask);
  const auto wants = V::broadcast(wanted);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const auto x = V::bit_and(V::load(p + i * int64_t(sizeof(Lane))), masks);
    const int hit = kNan ? V::first_greater(x, wants) : V::first_equal(x, wants);
    if (hit >= 0) return i + hit;
  }
  for (; i < n; ++i) {
    const Lane x = Lane(load_lane<Lane>(p + i * int64_t(sizeof(Lane))) & mask);
    if (kNan ? x > wanted : x == wanted) return i;
  }
  return 0;  // not reached
}

template <class V>
Packed span_argmax(const void* data, int64_t n, int32_t inf_bits) {
  using Lane = typename V::Lane;
  constexpr int64_t kSize = int64_t(sizeof(Lane));
  constexpr Lane kSignBit = V::kLowest;
  constexpr Lane kNoSign = V::kHighest;
  const Lane inf = Lane(inf_bits);
  const auto neg_inf = V::broadcast(Lane(inf | kSignBit));

  const unsigned char* const begin = static_cast<const unsigned char*>(data);
  const unsigned char* const end = begin + n * kSize;
  // The first block ends on a cache line, so that the vectors of all others do not straddle two (as
  // long as the elements themselves are aligned; if they are not, everything below still holds).
  const int64_t skew = int64_t(reinterpret_cast<uintptr_t>(begin) & (kAlign - 1));
  const unsigned char* p = begin;
  int64_t bytes = skew % kSize == 0 ? kBlockBytes - skew : kBlockBytes;

  // Raw bits of the best value so far, -0.0 written as +0.0; before the first block, less than all.
  Lane best = -1;
  auto bar = V::broadcast(best);                  // only what is above can improve on it, or ...
  int32_t best_order = -int64_t{0x7FFFFFFF} - 1;  // ... if best is negative, what is nearer to zero
  const unsigned char* best_block = begin;
  int64_t best_bytes = 0;

  for (; p != end; p += bytes, bytes = kBlockBytes) {
    if (end - p < bytes) bytes = end - p;
    const Extremes<V> scan = scan_block<V>(p, bytes / kSize, neg_inf);
    const bool nan = V::saw_nan(scan.watch, neg_inf);
    const bool above = V::any_greater(scan.smax, bar);
    if (best >= 0 && !above && !nan) continue;
    Lane top = max_of_lanes<V>(scan.smax);
    if (nan || top > inf) {
      // The first NaN wins whatever follows.
      const int64_t at = (p - begin) / kSize + find_first<V, true>(p, bytes / kSize, kNoSign, inf);
      return Packed(kNanOrder) << 32 | uint32_t(~uint32_t(at));
    }
    if (top < 0) top = min_of_block<V>(p, bytes / kSize);
    if (top == kSignBit) top = 0;
    const int32_t order = top >= 0 ? top : Lane(top ^ kNoSign);
    if (order > best_order) {
      best = top;
      best_order = order;
      best_block = p;
      best_bytes = bytes;
      bar = V::broadcast(top >= 0 ? top : Lane(-1));
    }
  }
  const int64_t at =
      (best_block - begin) / kSize +
      find_first<V, false>(best_block, best_bytes / kSize, best == 0 ? kNoSign : Lane(-1), best);
  return Packed(uint32_t(best_order) ^ 0x80000000u) << 32 | uint32_t(~uint32_t(at));
}

}  // namespace
}  // namespace pipespec::cpu
