// The algorithm behind rejection_span.hpp, over the vectors of coupled_impl.hpp. Included by each
// rejection_*.cpp and by nothing else; everything is in an unnamed namespace (see span_impl.hpp).
//
// weigh() reads a row once, in blocks, and adds up powers of two relative to the largest logit of
// the first block, or to the cutoff if that is higher. If a block's sum shows that this reference
// is far too low, the block is summed again relative to its own maximum. No result depends on how
// the operations here round.
//
// Its error: factor, product and difference round by 2^-24 each, so the exponent t of an id is off
// by |t| 2^-23 + |reference - t| 2^-24, and its power by ln2 times as much. On average over the
// powers, (largest t - t) ln2 is at most ln V, 21.5: the average of t ln2 is the logarithm of the
// sum, which is no less than the largest, less the entropy. The reference is at most 20 below the
// largest. So the sum is off by less than (|reference ln2| + 54) 2^-23 in proportion, by 3e-6 for
// the polynomial, by 512 * 2^-24 for adding up in a lane. The bound leaves a factor of two for
// these, and for higher orders, as long as it is below 1/4.
#pragma once

#include "coupled_impl.hpp"
#include "rejection_span.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kWeighBlock = 4096;
constexpr float kLargestSum = 0x1p+20f;  // of a block, relative to the reference
constexpr float kLargestFloat = 0x1.fffffep+127f;

// 2^f: minimax in relative error on [-1/2, 1/2], 2.8e-6 with roundings.
constexpr float kExp0 = 0x1.ffffe8p-1f, kExp1 = 0x1.62e0dcp-1f, kExp2 = 0x1.ec06dap-3f,
                kExp3 = 0x1.ca1440p-5f, kExp4 = 0x1.3997d6p-7f;

template <class V>
inline typename V::F power_of_two(typename V::F exponent) {
  const auto d = V::within_reach(exponent);
  const auto f = V::fraction(d);
  auto p = V::broadcast(kExp4);
  const float coefficients[] = {kExp3, kExp2, kExp1, kExp0};
  for (const float c : coefficients) p = V::multiply_add(p, f, V::broadcast(c));
  return V::scale(p, d, f);
}

// The largest of n logits; NaN if there is one.
template <class V, class Format>
inline float block_top(const unsigned char* data, int64_t n) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  alignas(64) unsigned char tail[kGroup * kSize];
  const auto infinity = V::broadcast(float_of_bits(0x7F800000u));
  auto top0 = V::broadcast(float_of_bits(0xFF800000u)), top1 = top0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, n - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    if (V::any(V::not_at_most(x0, infinity), V::not_at_most(x1, infinity)))
      return float_of_bits(0x7FC00000u);
    top0 = V::max(x0, top0);
    top1 = V::max(x1, top1);
  }
  float lanes[V::kLanes];
  V::store(lanes, V::max(top0, top1));
  float top = lanes[0];
  for (int64_t j = 1; j < V::kLanes; ++j) top = lanes[j] > top ? lanes[j] : top;
  return top;
}

// The sum of 2^(logit * factor - reference) over those of n logits that reach the cutoff; NaN,
// infinite or at least 2^64 if it is far too large.
template <class V, class Format>
inline double block_sum(const unsigned char* data, int64_t n, float factor, float reference,
                        float cutoff) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  alignas(64) unsigned char tail[kGroup * kSize];
  const auto factors = V::broadcast(factor);
  const auto cutoffs = V::broadcast(cutoff);
  const auto offset = V::broadcast(-reference);
  auto sum0 = V::broadcast(0.0f), sum1 = sum0;
  for (int64_t i = 0; i < n; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, n - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    const auto p0 = power_of_two<V>(V::multiply_add(x0, factors, offset));
    const auto p1 = power_of_two<V>(V::multiply_add(x1, factors, offset));
    sum0 = V::add_unless_less(sum0, x0, cutoffs, p0);
    sum1 = V::add_unless_less(sum1, x1, cutoffs, p1);
  }
  float lanes[kGroup];
  V::store(lanes, sum0);
  V::store(lanes + V::kLanes, sum1);
  double sum = 0;
  for (int64_t j = 0; j < kGroup; ++j) sum += double(lanes[j]);
  return sum;
}

template <class V, class Format>
Weight weigh(const void* row, int64_t begin, int64_t n, float factor, float cutoff) {
  const float minus_infinity = float_of_bits(0xFF800000u);
  const Weight unknown = {0, double(float_of_bits(0x7FC00000u))};
  const unsigned char* data = static_cast<const unsigned char*>(row) + begin * Format::kBytes;
  Weight all = {minus_infinity, 0};
  for (int64_t block; n > 0; n -= block, data += block * Format::kBytes) {
    block = n < kWeighBlock ? n : kWeighBlock;
    if (all.reference > minus_infinity) {
      const double sum = block_sum<V, Format>(data, block, factor, all.reference, cutoff);
      if (sum < double(kLargestSum)) {
        all.sum += sum;
        continue;
      }
    }
    float top = block_top<V, Format>(data, block);
    if (top < cutoff) top = cutoff;
    if (top == minus_infinity) continue;
    const float reference = top * factor;
    // Also true of a NaN.
    if (!(reference >= -kLargestFloat && reference <= kLargestFloat)) return unknown;
    if (all.sum > 0) all.sum *= __builtin_exp2(double(all.reference) - double(reference));
    all.reference = reference;
    all.sum += block_sum<V, Format>(data, block, factor, reference, cutoff);
  }
  return all;
}

// Passes the lanes `wanted` of the vector that begins at id `first` to the visitor; true if the
// scan is over.
template <class V>
inline bool show(Visitor& visitor, unsigned wanted, typename V::F scaled, typename V::I r,
                 int64_t first) {
  float noise[V::kLanes], scores[V::kLanes];
  V::store(noise, gumbel<V>(r));
  V::store(scores, scaled);
  for (; wanted != 0; wanted &= wanted - 1) {
    const int lane = __builtin_ctz(wanted);
    if (scores[lane] + noise[lane] <= visitor.bar) continue;
    if (visitor.visit(&visitor, first + lane, noise[lane])) return true;
  }
  return false;
}

// The filters of coupled_select, against the visitor's bar.
template <class V, class Format>
void scan(const CoupledRow& row, int64_t begin, int64_t n, Visitor& visitor) {
  constexpr int64_t kSize = Format::kBytes;
  constexpr int64_t kGroup = 2 * V::kLanes;
  const unsigned char* const data = static_cast<const unsigned char*>(row.data);
  const int64_t end = begin + n;
  const Random<V> random(row.seed, row.position, row.stream);
  const auto scale = V::broadcast(row.inv_temperature);
  const auto cutoff = V::broadcast(row.cutoff);
  const auto ceiling = V::broadcast(noise::kCeiling);
  auto bar = V::broadcast(visitor.bar);

  alignas(64) unsigned char tail[kGroup * kSize];
  for (int64_t i = begin; i < end; i += kGroup) {
    const unsigned char* const p = whole_group<V, Format>(data + i * kSize, end - i, tail);
    const auto x0 = Format::load(p);
    const auto x1 = Format::load(p + V::kLanes * kSize);
    const auto s0 = V::multiply(x0, scale);
    const auto s1 = V::multiply(x1, scale);
    auto m0 = V::both(V::not_less(x0, cutoff), V::not_at_most(V::add(s0, ceiling), bar));
    auto m1 = V::both(V::not_less(x1, cutoff), V::not_at_most(V::add(s1, ceiling), bar));
    if (!V::any(m0, m1)) continue;
    typename V::I r0, r1;
    random.get(uint32_t(i / 4), r0, r1);
    m0 = V::both(m0, V::not_at_most(V::add(s0, gumbel_bound<V>(r0)), bar));
    m1 = V::both(m1, V::not_at_most(V::add(s1, gumbel_bound<V>(r1)), bar));
    if (!V::any(m0, m1)) continue;
    if (show<V>(visitor, V::bits(m0), s0, r0, i) ||
        show<V>(visitor, V::bits(m1), s1, r1, i + V::kLanes))
      return;
    bar = V::broadcast(visitor.bar);
  }
}

template <class V, class Format>
constexpr RejectionKernels::OfFormat kOfFormat = {weigh<V, Format>, scan<V, Format>};

}  // namespace
}  // namespace pipespec::cpu
