// Attention of a few queries over many keys, written once over a vector type: see
// decoder_kernels.hpp for what it computes. In an unnamed namespace, see span_impl.hpp.
//
// The positions come in spans of a fixed size. Each span has a softmax of its own, and its result
// is merged into that of the spans before it. Within a span, chunks of keys are packed so that a
// lane holds a position, and chunks of values so that a lane holds an element: both products are
// then the same small matrix product, which reads what is packed once for all queries. A query's
// numbers depend on its position and on what it sees, and on nothing else.
#pragma once

#include <stdint.h>

#include "attend_products.hpp"
#include "decoder_kernels.hpp"
#include "exponential.hpp"
#include "lanes.hpp"

namespace pipespec::cpu {
namespace {

inline constexpr int64_t kAttendQueries = 64;

// limit * tanh(x / limit), with tanh(u) = sign(u) (1 - e^(-2 |u|)) / (1 + e^(-2 |u|)). That form
// cancels where u is small; there it is x (1 + u^2 P(u^2)), with the polynomial of Cephes' tanhf.
template <class V>
inline typename V::F capped(typename V::F x, float limit) {
  using F = typename V::F;
  const F zero = V::broadcast(0.0f), one = V::broadcast(1.0f), top = V::broadcast(limit);
  const F size = V::max(x, V::subtract(zero, x));
  const F e = exponential<V>(V::multiply(size, V::broadcast(-2.0f / limit)));
  const F sign = V::where_less(x, zero, V::subtract(zero, top), top);
  const F large = V::multiply(sign, V::divide(V::subtract(one, e), V::add(one, e)));
  const F u = V::multiply(size, V::broadcast(1.0f / limit)), square = V::multiply(u, u);
  F p = V::broadcast(-5.70498872745e-3f);
  p = V::multiply_add(p, square, V::broadcast(2.06390887954e-2f));
  p = V::multiply_add(p, square, V::broadcast(-5.37397155531e-2f));
  p = V::multiply_add(p, square, V::broadcast(1.33314422036e-1f));
  p = V::multiply_add(p, square, V::broadcast(-3.33332819422e-1f));
  const F small = V::multiply_add(V::multiply(p, square), x, x);
  return V::where_less(u, V::broadcast(0.625f), small, large);
}

template <class V>
inline float exponential_of(float x) {
  float lanes[V::kLanes];
  V::store(lanes, exponential<V>(V::broadcast(x)));
  return lanes[0];
}

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t padded_dim(int64_t head_dim) { return rounded_up(head_dim, 2 * kMaxLanes); }

// Result of the softmax over a part of the positions: its highest score (minus infinity: none of
// them is visible), the sum of e^(score - highest), and the values times these weights.
struct PartialSoftmax {
  float highest, sum;
  float* values;
};

// to = both parts; `from` follows `to`.
template <class V>
void merge(PartialSoftmax& to, const PartialSoftmax& from, int64_t n) {
  using F = typename V::F;
  if (from.highest == -__builtin_inff()) return;
  const bool is_first = to.highest == -__builtin_inff();
  const float highest = to.highest > from.highest ? to.highest : from.highest;
  const float old = is_first ? 0.0f : exponential_of<V>(to.highest - highest);
  const float fresh = exponential_of<V>(from.highest - highest);
  const F a = V::broadcast(old), b = V::broadcast(fresh);
  for (int64_t d = 0; d < n; d += V::kLanes) {
    const F have = V::multiply(Float32::load(bytes_of(to.values + d)), a);
    V::store(to.values + d, V::multiply_add(Float32::load(bytes_of(from.values + d)), b, have));
  }
  to.sum = to.sum * old + from.sum * fresh;
  to.highest = highest;
}

// Up to kAttendQueries queries of a task, in its scratch memory.
template <class V, class Steps>
class QueryBlock {
  static constexpr int64_t kLanes = V::kLanes;
  const AttendTask& task_;
  const int64_t first_, count_, padded_ = padded_dim(task_.head_dim);
  int64_t begins_[kAttendQueries] = {}, ends_[kAttendQueries] = {};
  float highest_[kAttendQueries] = {}, sums_[kAttendQueries] = {};
  float *const memory_, *const queries_, *const values_, *const packed_, *const scores_;

 public:
  QueryBlock(const AttendTask& task, int64_t first, int64_t count)
      : task_(task),
        first_(first),
        count_(count),
        memory_(task.scratch),
        queries_(memory_ + kAttendQueries * padded_),
        values_(queries_ + kAttendQueries * padded_),
        packed_(values_ + kAttendQueries * padded_),
        scores_(packed_ + kAttendChunk * padded_) {
    for (int64_t q = 0; q < count; ++q) {
      const int64_t column = (first + q) / task.group;
      const float* const from =
          task.queries + column * task.query_stride + (first + q) % task.group * task.head_dim;
      float* const to = queries_ + q * padded_;
      // Scores are compared before they are scaled.
      const float sign = task.scale < 0 ? -1.0f : 1.0f;
      for (int64_t d = 0; d < padded_; ++d) to[d] = d < task.head_dim ? sign * from[d] : 0.0f;
      Steps::round(to, padded_, to);
      ends_[q] = task.positions + column;
      begins_[q] = task.window > 0 && task.window < ends_[q] ? ends_[q] - task.window : 0;
    }
  }

  int64_t count() const { return count_; }
  // kAttendQueries * padded_dim(head_dim) floats for the caller.
  float* memory() const { return memory_; }
  int64_t first_span() const { return begins_[0] / kAttendSpan; }
  int64_t end_span() const { return (ends_[count_ - 1] + kAttendSpan - 1) / kAttendSpan; }
  PartialSoftmax part(int64_t q) { return {highest_[q], sums_[q], values_ + q * padded_}; }

  // Computes the parts of one span.
  void run(int64_t span) {
    const int64_t base = span * kAttendSpan;
    const int64_t begin = larger(begins_[0] / kAttendChunk * kAttendChunk - base, 0);
    const int64_t end = smaller(rounded_up(ends_[count_ - 1] - base, 2 * kLanes), kAttendSpan);
    const bool is_few = count_ <= kUnpackedQueries && reads_storage<V, Steps>(task_.head_dim);
    for (int64_t at = begin; at < end; at += kAttendChunk) {
      const int64_t n = smaller(end - at, kAttendChunk);
      const Chunk next = at + n < end ? Chunk{task_.keys, task_.key_stride, base + at + n}
                                      : Chunk{task_.values, task_.value_stride, base + begin};
      is_few ? score_few(base, at, n, next) : score(base, at, n, next);
    }
    for (int64_t q = 0; q < count_; ++q) soften(q, base, begin, end);
    for (int64_t at = begin; at < end; at += kAttendChunk) {
      const int64_t n = smaller(end - at, kAttendChunk);
      const Chunk next = at + n < end ? Chunk{task_.values, task_.value_stride, base + at + n}
                                      : Chunk{task_.keys, task_.key_stride, base + end};
      if (Steps::kInPlace && task_.head_dim % kLanes == 0)
        weigh_in_place(base, at, n, at == begin, next);
      else if (is_few)
        weigh_few(base, at, n, at == begin, next);
      else
        weigh(base, at, n, at == begin, next);
    }
  }

 private:
  // Keys or values from a position on.
  struct Chunk {
    const void* tokens;
    int64_t stride, position;
    int64_t bytes() const { return stride * Steps::Format::kBytes; }
    const unsigned char* begin() const {
      return static_cast<const unsigned char*>(tokens) + position * bytes();
    }
  };

  // The scores of positions base + at .. base + at + n - 1, and the values of these positions.
  void score(int64_t base, int64_t at, int64_t n, const Chunk& next) {
    pack_keys(base + at, n);
    SmallProduct p{queries_,     padded_,     packed_, kAttendChunk, steps_of(task_.head_dim),
                   scores_ + at, kAttendSpan, true,    nullptr,      0};
    ask_for(next, p);
    multiply<V, Steps>(p, count_, n / kLanes);
  }
  void weigh(int64_t base, int64_t at, int64_t n, bool fresh, const Chunk& next) {
    pack_values(base + at, n);
    SmallProduct p{weights(at), kAttendSpan, packed_, padded_, n / Steps::kStep,
                   values_,     padded_,     fresh,   nullptr, 0};
    ask_for(next, p);
    multiply<V, Steps>(p, count_, padded_ / kLanes);
  }
  void weigh_in_place(int64_t base, int64_t at, int64_t n, bool fresh, const Chunk& next) {
    const int64_t first = larger(at, begins_[0] - base);
    SmallProduct p{scores_ + first,
                   kAttendSpan,
                   static_cast<const float*>(task_.values) + (base + first) * task_.value_stride,
                   task_.value_stride,
                   smaller(at + n, ends_[count_ - 1] - base) - first,
                   values_,
                   padded_,
                   fresh,
                   nullptr,
                   0};
    ask_for(next, p);
    multiply<V, Steps>(p, count_, task_.head_dim / kLanes);
  }
  const float* weights(int64_t at) const { return scores_ + at / Steps::kStep; }

  // The same straight from storage.
  void score_few(int64_t base, int64_t at, int64_t n, const Chunk& next) {
    const Rows rows = rows_of({task_.keys, task_.key_stride, base + at}, n, next);
    each_few([&](int64_t q, int64_t count) {
      multiply_few<V, Steps, true>({rows, task_.head_dim, queries_ + q * padded_, padded_,
                                    scores_ + q * kAttendSpan + at, kAttendSpan, true},
                                   count);
    });
  }
  void weigh_few(int64_t base, int64_t at, int64_t n, bool fresh, const Chunk& next) {
    const Rows rows = rows_of({task_.values, task_.value_stride, base + at}, n, next);
    each_few([&](int64_t q, int64_t count) {
      multiply_few<V, Steps, false>({rows, task_.head_dim, weights(at) + q * kAttendSpan,
                                     kAttendSpan, values_ + q * padded_, padded_, fresh},
                                    count);
    });
  }
  // As often as their sums need registers. The rows are in the first-level cache after the first
  // time.
  template <class Multiply>
  void each_few(const Multiply& multiply) const {
    const int64_t times = (count_ + kFewQueries - 1) / kFewQueries;
    for (int64_t i = 0; i < times; ++i) {
      const int64_t first = count_ * i / times;
      multiply(first, count_ * (i + 1) / times - first);
    }
  }
  Rows rows_of(const Chunk& chunk, int64_t n, const Chunk& next) const {
    Rows rows;
    rows.count = n;
    for (int64_t l = 0; l < n; ++l) rows.at[l] = at(chunk.tokens, chunk.stride, chunk.position + l);
    const int64_t more = smaller(kAttendChunk, ends_[count_ - 1] - next.position);
    rows.next = next.begin();
    rows.end =
        more > 0 && next.stride <= 2 * task_.head_dim ? rows.next + more * next.bytes() : rows.next;
    return rows;
  }

  static int64_t steps_of(int64_t elements) { return (elements + Steps::kStep - 1) / Steps::kStep; }

  // Lets a product ask for a chunk.
  void ask_for(const Chunk& chunk, SmallProduct& p) const {
    const int64_t n = smaller(kAttendChunk, ends_[count_ - 1] - chunk.position);
    if (n <= 0 || chunk.stride > 2 * task_.head_dim) return;
    p.ahead = chunk.begin();
    p.ahead_bytes = n * chunk.bytes();
  }

  // Positions that no query sees are replaced by the nearest ones that are seen.
  const unsigned char* at(const void* tokens, int64_t stride, int64_t position) const {
    const int64_t seen = smaller(larger(position, begins_[0]), ends_[count_ - 1] - 1);
    return static_cast<const unsigned char*>(tokens) + seen * stride * Steps::Format::kBytes;
  }

  // packed[step, position]
  void pack_keys(int64_t first, int64_t n) {
    constexpr int64_t kElements = kLanes * Steps::kWord, kWords = Steps::kWord / Steps::kStep;
    for (int64_t i = 0; i < n; i += kLanes) {
      const unsigned char* keys[kLanes];
      for (int64_t l = 0; l < kLanes; ++l)
        keys[l] = at(task_.keys, task_.key_stride, first + i + l);
      float* to = packed_ + i;
      for (int64_t d = 0; d < task_.head_dim; d += kElements) {
        typename V::I words[kLanes];
        const int64_t left = task_.head_dim - d;
        for (int64_t l = 0; l < kLanes; ++l) {
          const unsigned char* const key = keys[l] + d * Steps::Format::kBytes;
          if (left >= kElements) {
            words[l] = V::bits_of(Float32::load(key));
          } else {
            unsigned char buffer[kLanes * 4] = {};
            copy_bytes<typename Steps::Format>(buffer, key, left);
            words[l] = V::bits_of(Float32::load(buffer));
          }
        }
        V::transpose(words);
#pragma GCC unroll 16
        for (int64_t l = 0; l < kLanes; ++l) {
          typename V::F parts[kWords];
          Steps::split(words[l], parts);
          for (int64_t part = 0; part < kWords; ++part, to += kAttendChunk)
            V::store(to, parts[part]);
        }
      }
    }
  }

  // packed[step, element]
  void pack_values(int64_t first, int64_t n) {
    constexpr int64_t kStep = Steps::kStep, kElements = kLanes * kStep;
    for (int64_t i = 0; i < n; i += kStep) {
      const unsigned char* rows[kStep];
      for (int64_t j = 0; j < kStep; ++j)
        rows[j] = at(task_.values, task_.value_stride, first + i + j);
      float* const to = packed_ + i / kStep * padded_;
      for (int64_t d = 0; d < padded_; d += kElements) {
        typename V::F parts[kStep];
        Steps::join(rows, larger(task_.head_dim - d, 0), parts);
        for (int64_t j = 0; j < kStep; ++j) V::store(to + d + j * kLanes, parts[j]);
        for (const unsigned char*& row : rows) row += kElements * Steps::Format::kBytes;
      }
    }
  }

  // Turns the scores of positions base + begin .. base + end - 1 into e^(score - the highest one);
  // those of positions that query q does not see become zero.
  void soften(int64_t q, int64_t base, int64_t begin, int64_t end) {
    using F = typename V::F;
    float* const scores = scores_ + q * kAttendSpan;
    const int64_t from = larger(begins_[q] - base, begin), to = smaller(ends_[q] - base, end);
    const auto fill = [scores](int64_t t, int64_t until, float value) {
      for (; t < until; ++t) scores[t] = value;
    };
    highest_[q] = -__builtin_inff();
    sums_[q] = 0.0f;
    if (from < to) {
      const int64_t low = from / kLanes * kLanes, high = rounded_up(to, kLanes);
      const float size = task_.scale < 0 ? -task_.scale : task_.scale;
      const float scale = task_.softcap > 0 ? 1.0f : size;
      for (int64_t t = low; task_.softcap > 0 && t < high; t += kLanes) {
        const F x = V::multiply(Float32::load(bytes_of(scores + t)), V::broadcast(size));
        V::store(scores + t, capped<V>(x, task_.softcap));
      }
      fill(low, from, -__builtin_inff());
      fill(to, high, -__builtin_inff());
      F top = Float32::load(bytes_of(scores + low));
      for (int64_t t = low + kLanes; t < high; t += kLanes)
        top = V::max(top, Float32::load(bytes_of(scores + t)));
      float lanes[kLanes];
      V::store(lanes, top);
      for (float lane : lanes) highest_[q] = lane > highest_[q] ? lane : highest_[q];
      highest_[q] *= scale;
      const F factor = V::broadcast(scale), base_score = V::broadcast(-highest_[q]);
      const F hidden = V::broadcast(-3e38f), zero = V::broadcast(0.0f);
      F sum = zero;
      for (int64_t t = low; t < high; t += kLanes) {
        const F x = Float32::load(bytes_of(scores + t));
        const F e = exponential<V>(V::multiply_add(x, factor, base_score));
        const F weight = V::where_less(x, hidden, zero, e);
        V::store(scores + t, weight);
        sum = V::add(sum, weight);
      }
      fill(begin, low, 0.0f);
      fill(high, end, 0.0f);
      sums_[q] = sum_of_lanes<V>(sum);
    } else {
      fill(begin, end, 0.0f);
    }
    // Rounded weights lie closer together.
    Steps::round(scores + begin, end - begin, scores + begin / Steps::kStep);
  }
};

// The memory of the part of one query and span among a task's `partials`.
inline float* partial_at(const AttendTask& task, int64_t query, int64_t span) {
  return task.partials + (query * task.spans + span) * (padded_dim(task.head_dim) + 2);
}

template <class V>
void finish(const AttendTask& task, int64_t query, const PartialSoftmax& sums) {
  float factor = 1.0f / sums.sum;
  if (task.sinks != nullptr) {
    const float sink = task.sinks[query % task.group];
    const float highest = sums.highest > sink ? sums.highest : sink;
    const float own = exponential_of<V>(sums.highest - highest);
    factor = own / (sums.sum * own + exponential_of<V>(sink - highest));
  }
  float* const out =
      task.out + query / task.group * task.out_stride + query % task.group * task.head_dim;
  for (int64_t d = 0; d < task.head_dim; ++d) out[d] = sums.values[d] * factor;
}

// Whether a sum is a number. One that is not may come from a position that the query does not see,
// but another one of its block: zero times infinity.
inline bool is_finite(const PartialSoftmax& sums, int64_t n) {
  float all = sums.sum - sums.sum;
  for (int64_t d = 0; d < n; ++d) all += sums.values[d] - sums.values[d];
  return all == 0.0f;
}

template <class V, class Steps>
void attend_block(const AttendTask& task, int64_t first, int64_t count) {
  const int64_t padded = padded_dim(task.head_dim);
  bool is_right[kAttendQueries] = {};
  {
    QueryBlock<V, Steps> block(task, first, count);
    PartialSoftmax sums[kAttendQueries];
    for (int64_t q = 0; q < count; ++q) {
      sums[q] = {-__builtin_inff(), 0.0f, block.memory() + q * padded};
      for (int64_t d = 0; d < padded; ++d) sums[q].values[d] = 0.0f;
    }
    for (int64_t span = block.first_span(); span < block.end_span(); ++span) {
      block.run(span);
      for (int64_t q = 0; q < count; ++q) merge<V>(sums[q], block.part(q), padded);
    }
    for (int64_t q = 0; q < count; ++q) {
      is_right[q] = count == 1 || is_finite(sums[q], task.head_dim);
      finish<V>(task, first + q, sums[q]);
    }
  }
  for (int64_t q = 0; q < count; ++q)
    if (!is_right[q]) attend_block<V, Steps>(task, first + q, 1);
}

template <class V, class Steps>
void attend(const AttendTask& task) {
  const int64_t all = task.columns * task.group;
  for (int64_t first = 0; first < all; first += kAttendQueries)
    attend_block<V, Steps>(task, first, smaller(all - first, kAttendQueries));
}

template <class V, class Steps>
void attend_span(const AttendTask& task, int64_t span, int64_t first, int64_t count) {
  const int64_t padded = padded_dim(task.head_dim);
  bool is_right[kAttendQueries] = {};
  {
    QueryBlock<V, Steps> block(task, first, count);
    const bool is_seen = block.first_span() <= span && span < block.end_span();
    if (is_seen) block.run(span);
    for (int64_t q = 0; q < count; ++q) {
      float* const to = partial_at(task, first + q, span);
      to[0] = -__builtin_inff();
      is_right[q] = true;
      if (!is_seen) continue;
      const PartialSoftmax part = block.part(q);
      is_right[q] = count == 1 || is_finite(part, task.head_dim);
      to[0] = part.highest;
      to[1] = part.sum;
      for (int64_t d = 0; d < padded; ++d) to[2 + d] = part.values[d];
    }
  }
  for (int64_t q = 0; q < count; ++q)
    if (!is_right[q]) attend_span<V, Steps>(task, span, first + q, 1);
}

template <class V, class Steps>
void attend_spans(const AttendTask& task, int64_t begin, int64_t end) {
  const int64_t all = task.columns * task.group;
  for (int64_t span = begin; span < end; ++span)
    for (int64_t first = 0; first < all; first += kAttendQueries)
      attend_span<V, Steps>(task, span, first, smaller(all - first, kAttendQueries));
}

template <class V>
void merge_spans(const AttendTask& task) {
  const int64_t padded = padded_dim(task.head_dim);
  for (int64_t q = 0; q < task.columns * task.group; ++q) {
    PartialSoftmax sums{-__builtin_inff(), 0.0f, task.scratch};
    for (int64_t d = 0; d < padded; ++d) sums.values[d] = 0.0f;
    for (int64_t span = 0; span < task.spans; ++span) {
      float* const from = partial_at(task, q, span);
      merge<V>(sums, {from[0], from[1], from + 2}, padded);
    }
    finish<V>(task, q, sums);
  }
}

inline int64_t scratch_floats(int64_t head_dim) {
  return (3 * kAttendQueries + kAttendChunk) * padded_dim(head_dim) + kAttendQueries * kAttendSpan;
}

inline int64_t partial_floats(int64_t head_dim) { return padded_dim(head_dim) + 2; }

template <class V, class Steps>
constexpr AttendKernels attend_kernels() {
  return {attend<V, Steps>, attend_spans<V, Steps>, merge_spans<V>, scratch_floats, partial_floats};
}

}  // namespace
}  // namespace pipespec::cpu
