// The algorithm behind logprobs_span.hpp, over the vectors of coupled_impl.hpp. Included by each
// logprobs_*.cpp and by nothing else; everything is in an unnamed namespace (see span_impl.hpp).
//
// A span is read in blocks that stay in the first-level cache: first for the largest logit, then
// for the exponentials, relative to the largest score so far, and again only where the block may
// hold one of the leaders. A lane adds up kGroups numbers in fp32; the lanes of all blocks are
// added in double.
#pragma once

#include "exponential.hpp"
#include "logprobs_span.hpp"
#include "rejection_impl.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kGroups = 16;  // of two vectors, in a block

// The sum of e^(logit * scale - largest) over those of n <= kGroups groups that reach the cutoff.
template <class V, class Format>
inline double exponentials(const unsigned char* data, int64_t n, float scale, float largest,
                           float cutoff) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  alignas(64) unsigned char tail[kGroup * kSize];
  const auto scales = V::broadcast(scale);
  const auto tops = V::broadcast(largest);
  const auto cutoffs = V::broadcast(cutoff);
  auto sum0 = V::broadcast(0.0f), sum1 = sum0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, n - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    const auto e0 = exponential<V>(V::subtract(V::multiply(x0, scales), tops));
    const auto e1 = exponential<V>(V::subtract(V::multiply(x1, scales), tops));
    sum0 = V::add_unless_less(sum0, x0, cutoffs, e0);
    sum1 = V::add_unless_less(sum1, x1, cutoffs, e1);
  }
  float lanes[V::kLanes];
  V::store(lanes, V::add(sum0, sum1));
  double sum = 0;
  for (int64_t j = 0; j < V::kLanes; ++j) sum += double(lanes[j]);
  return sum;
}

// Passes what exceeds the bar and reaches the cutoff to `leaders`; `first` is the id at `data`.
template <class V, class Format>
inline void lead(const unsigned char* data, int64_t n, int64_t first, float cutoff,
                 Leaders& leaders) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  alignas(64) unsigned char tail[kGroup * kSize];
  const auto cutoffs = V::broadcast(cutoff);
  auto bar = V::broadcast(leaders.bar);
  for (int64_t i = 0; i < n; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, n - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    const auto m0 = V::both(V::not_less(x0, cutoffs), V::not_at_most(x0, bar));
    const auto m1 = V::both(V::not_less(x1, cutoffs), V::not_at_most(x1, bar));
    if (!V::any(m0, m1)) continue;
    float lanes[kGroup];
    V::store(lanes, x0);
    V::store(lanes + V::kLanes, x1);
    for (uint64_t wanted = uint64_t(V::bits(m0)) | uint64_t(V::bits(m1)) << V::kLanes; wanted != 0;
         wanted &= wanted - 1) {
      const int lane = __builtin_ctzll(wanted);
      if (lanes[lane] > leaders.bar) leaders.visit(&leaders, first + i + lane, lanes[lane]);
    }
    bar = V::broadcast(leaders.bar);
  }
}

template <class V, class Format>
LogSum sum_and_lead(const void* row, int64_t begin, int64_t n, float scale, float cutoff,
                    Leaders* leaders) {
  constexpr int64_t kBlock = kGroups * 2 * V::kLanes;
  const float minus_infinity = float_of_bits(0xFF800000u);
  const LogSum none = {0, double(float_of_bits(0x7FC00000u))};
  const unsigned char* data = static_cast<const unsigned char*>(row) + begin * Format::kBytes;
  LogSum all = {minus_infinity, 0};
  for (int64_t block; n > 0; n -= block, begin += block, data += block * Format::kBytes) {
    block = n < kBlock ? n : kBlock;
    const float top = block_top<V, Format>(data, block);
    const float score = top * scale;
    if (!(score <= kLargestFloat)) return none;  // NaN or +inf
    if (top < cutoff) continue;
    if (score > all.largest) {
      all.sum *= __builtin_exp(double(all.largest) - double(score));
      all.largest = score;
    }
    if (all.largest > minus_infinity)
      all.sum += exponentials<V, Format>(data, block, scale, all.largest, cutoff);
    if (leaders != nullptr && top > leaders->bar)
      lead<V, Format>(data, block, begin, cutoff, *leaders);
  }
  return all;
}

}  // namespace
}  // namespace pipespec::cpu
