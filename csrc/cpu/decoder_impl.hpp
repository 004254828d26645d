// The algorithms behind decoder_kernels.hpp, written once over a vector type. Included by each
// decoder_*.cpp and by nothing else; in an unnamed namespace, see span_impl.hpp.
//
// A product keeps one accumulator per output and row, so that the sum over the inputs has one
// order. The latency of the additions is hidden by working on several panels for one row, and on
// several rows for one panel. Weights are expanded once for all rows of a block. Blocks that share
// weights take turns on so few inputs that the weights come from memory once.
#pragma once

#include <stdint.h>

#include "decoder_kernels.hpp"
#include "exponential.hpp"

namespace pipespec::cpu {
namespace {

inline const unsigned char* bytes_of(const float* p) {
  return reinterpret_cast<const unsigned char*>(p);
}

template <class V>
inline constexpr int kVectors = int(kPanelOutputs) / V::kLanes;  // per panel

// The panels that a block of `rows` works on at once: a power of two, at most two groups.
template <class V>
constexpr int panels_at_once(int rows) {
  int panels = 1;
  while (panels < 2 * kGroupPanels && 2 * panels * rows * kVectors<V> <= V::kAccumulators)
    panels *= 2;
  return panels;
}

// Maximum rows of a block: with more, a block would work on less than V::kMinPanels at once.
template <class V>
constexpr int max_rows() {
  const int rows = V::kAccumulators / (V::kMinPanels * kVectors<V>);
  return rows < 8 ? rows : 8;
}

// Weights that several blocks read one after the other: they stay in the first-level cache.
inline constexpr int64_t kChunkBytes = 16 << 10;

// Some inputs of some panels of a group, and perhaps of the same ones of the next group.
struct Chunk {
  const unsigned char* weights;
  int64_t input_bytes, group_bytes;  // from one input to the next, and from one group to the next
  int64_t inputs;
  const unsigned char* ahead;  // what to prefetch with the first input
  int64_t ahead_bytes;         // from one input to the next
  bool is_first;               // else the sums go on from those in `out`
};

template <class V, class Weights, int kRows, int kPanels>
void block(const Chunk& chunk, const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  constexpr int64_t kPanelBytes = Weights::kBytes * kPanelOutputs;  // per input
  const int64_t input_bytes = chunk.input_bytes, group_bytes = chunk.group_bytes;
  const int64_t inputs = chunk.inputs;
  const unsigned char *w = chunk.weights, *ahead = chunk.ahead;
  typename V::F sums[kRows][kPanels][kVectors<V>];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors<V>; ++v)
        sums[r][p][v] =
            chunk.is_first
                ? V::broadcast(0.0f)
                : Float32::load(bytes_of(out + r * out_stride + p * kPanelOutputs + v * V::kLanes));
#pragma GCC unroll 2
  for (int64_t k = 0; k < inputs; ++k, w += input_bytes, ahead += chunk.ahead_bytes) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      typename V::F weights[kVectors<V>];
      const int64_t at = p / kGroupPanels * group_bytes + p % kGroupPanels * kPanelBytes;
      if (p % kGroupPanels * kPanelBytes % 64 == 0) __builtin_prefetch(ahead + at);
      Weights::load(w + at, weights);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename V::F xr = V::broadcast(x[r * x_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors<V>; ++v) {
          sums[r][p][v] = V::multiply_add(weights[v], xr, sums[r][p][v]);
          V::pin(sums[r][p][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors<V>; ++v)
        V::store(out + r * out_stride + p * kPanelOutputs + v * V::kLanes, sums[r][p][v]);
}

using Block = void (*)(const Chunk&, const float*, int64_t, float*, int64_t);

// The block of at most kRows rows that has `rows` rows, for `panels` panels: a power of two.
template <class V, class Weights, int kRows, int kPanels = panels_at_once<V>(kRows)>
Block find_block(int rows, int panels) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return find_block<V, Weights, kRows - 1>(rows, panels);
  }
  if constexpr (kPanels > 1) {
    if (panels < kPanels) return find_block<V, Weights, kRows, kPanels / 2>(rows, panels);
  }
  return block<V, Weights, kRows, kPanels>;
}

// One group, or two whole ones.
template <class V, class Weights>
void groups_product(const unsigned char* groups, int64_t inputs, int panels, const float* x,
                    int64_t x_stride, int64_t rows, float* out, int64_t out_stride) {
  constexpr int kRows = max_rows<V>();
  const int64_t group_panels = panels < kGroupPanels ? panels : kGroupPanels;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  const int max_at_once = panels_at_once<V>(int((rows + blocks - 1) / blocks));
  const int64_t input_bytes = group_panels * kPanelOutputs * Weights::kBytes;
  int64_t sweeps = 0;  // over the weights
  for (int p = 0, at_once = max_at_once; p < panels; p += at_once, sweeps += blocks)
    while (at_once > panels - p) at_once /= 2;
  const int64_t at_a_time = sweeps == 1 ? inputs : kChunkBytes / input_bytes;
  for (int64_t k = 0; k < inputs; k += at_a_time) {
    const int64_t count = inputs - k < at_a_time ? inputs - k : at_a_time;
    const unsigned char* const weights = groups + k * input_bytes;
    // Each of several sweeps asks for a part of the next chunk: memory is at work in all of them.
    const unsigned char* ahead = weights + (sweeps == 1 ? kPrefetchBytes : count * input_bytes);
    int64_t row = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t end = rows * (b + 1) / blocks;
      int at_once = max_at_once;
      for (int p = 0; p < panels; p += at_once) {
        while (at_once > panels - p) at_once /= 2;
        const Chunk chunk{weights + p * kPanelOutputs * Weights::kBytes,
                          input_bytes,
                          inputs * input_bytes,
                          count,
                          ahead,
                          input_bytes / sweeps,
                          k == 0};
        ahead += count * input_bytes / sweeps;
        find_block<V, Weights, kRows>(int(end - row), at_once)(
            chunk, x + row * x_stride + k, x_stride, out + row * out_stride + p * kPanelOutputs,
            out_stride);
      }
      row = end;
    }
  }
}

template <class V, class Weights>
void product(const unsigned char* groups, int64_t inputs, int64_t panel_count, const float* x,
             int64_t x_stride, int64_t rows, float* out, int64_t out_stride) {
  constexpr int kRows = max_rows<V>();
  // Two groups at once only where one block computes all of them.
  const bool in_pairs = rows <= kRows && panels_at_once<V>(int(rows)) == 2 * int(kGroupPanels);
  for (int64_t p = 0; p < panel_count;) {
    const int64_t rest = panel_count - p;
    const int64_t count = in_pairs && rest >= 2 * kGroupPanels ? 2 * kGroupPanels
                          : rest < kGroupPanels                ? rest
                                                               : kGroupPanels;
    groups_product<V, Weights>(groups + p * inputs * Weights::kBytes * kPanelOutputs, inputs,
                               int(count), x, x_stride, rows, out + p * kPanelOutputs, out_stride);
    p += count;
  }
}

// The sum of the lanes, in a fixed order.
template <class V>
inline float sum_of_lanes(typename V::F x) {
  float lanes[V::kLanes];
  V::store(lanes, x);
  for (int n = V::kLanes / 2; n >= 1; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

template <class Format>
inline void copy_bytes(unsigned char* to, const unsigned char* from, int64_t elements) {
  for (int64_t i = 0; i < elements * Format::kBytes; ++i) to[i] = from[i];
}

// The first `n` < kLanes elements at p and zeros after them; reads nothing else.
template <class V, class Format>
inline typename V::F load_part(const unsigned char* p, int64_t n) {
  unsigned char buffer[V::kLanes * 4] = {};
  copy_bytes<Format>(buffer, p, n);
  return Format::load(buffer);
}

// 1 / sqrt(mean(x^2) + eps)
template <class V>
float inverse_rms(const float* x, int64_t n, float eps) {
  constexpr int64_t kLanes = V::kLanes;
  using F = typename V::F;
  F sums[4] = {V::broadcast(0.0f), V::broadcast(0.0f), V::broadcast(0.0f), V::broadcast(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F y = Float32::load(bytes_of(x + i + j * kLanes));
      sums[j] = V::multiply_add(y, y, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const F y = n - i < kLanes ? load_part<V, Float32>(bytes_of(x + i), n - i)
                               : Float32::load(bytes_of(x + i));
    sums[0] = V::multiply_add(y, y, sums[0]);
  }
  const float sum = sum_of_lanes<V>(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(sum / float(n) + eps);
}

template <class V>
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float factor = inverse_rms<V>(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// x / (1 + e^-z)
template <class V>
inline typename V::F times_sigmoid(typename V::F x, typename V::F z) {
  const auto e = exponential<V>(V::subtract(V::broadcast(0.0f), z));
  return V::divide(x, V::add(V::broadcast(1.0f), e));
}

template <class V>
void activate(Activation kind, const float* products, int64_t panel_pairs, float* out) {
  using F = typename V::F;
  for (int64_t p = 0; p < panel_pairs; ++p, products += 2 * kPanelOutputs, out += kPanelOutputs) {
    const float* const gate = products;
    const float* const up = products + kPanelOutputs;
    if (kind == Activation::kGelu) {
      for (int64_t i = 0; i < kPanelOutputs; ++i)
        out[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.707106781f)) * up[i];
      continue;
    }
    for (int64_t i = 0; i < kPanelOutputs; i += V::kLanes) {
      const F g = Float32::load(bytes_of(gate + i));
      F z = g;
      if (kind == Activation::kGeluTanh) {
        // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
        const F cube = V::multiply(V::multiply(g, g), g);
        z = V::multiply(V::multiply_add(cube, V::broadcast(0.044715f), g),
                        V::broadcast(1.59576912f));
      }
      V::store(out + i, V::multiply(times_sigmoid<V>(g, z), Float32::load(bytes_of(up + i))));
    }
  }
}

// Scores of kLanes keys. A lane's sum has one order, wherever the key stands.
template <class V, class Format>
inline typename V::F score(const float* query, const unsigned char* (&keys)[V::kLanes],
                           int64_t head_dim) {
  typename V::F sums[V::kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < V::kLanes; ++i) sums[i] = V::broadcast(0.0f);
  int64_t d = 0;
  for (; d + V::kLanes <= head_dim; d += V::kLanes) {
    const auto q = Float32::load(bytes_of(query + d));
#pragma GCC unroll 16
    for (int i = 0; i < V::kLanes; ++i)
      sums[i] = V::multiply_add(Format::load(keys[i] + d * Format::kBytes), q, sums[i]);
  }
  if (d < head_dim) {
    const auto q = load_part<V, Float32>(bytes_of(query + d), head_dim - d);
    for (int i = 0; i < V::kLanes; ++i)
      sums[i] = V::multiply_add(load_part<V, Format>(keys[i] + d * Format::kBytes, head_dim - d), q,
                                sums[i]);
  }
  return V::sum_each(sums);
}

// out[0 .. kCount * kLanes) += the sum over t of weights[t] * values[t, the same], in the order of
// t
template <class V, class Format, int kCount>
inline void add_weighted(const float* weights, int64_t n, const unsigned char* values,
                         int64_t stride, float* out) {
  typename V::F sums[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) sums[i] = Float32::load(bytes_of(out + i * V::kLanes));
  for (int64_t t = 0; t < n; ++t, values += stride) {
    const auto weight = V::broadcast(weights[t]);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i)
      sums[i] =
          V::multiply_add(Format::load(values + i * V::kLanes * Format::kBytes), weight, sums[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) V::store(out + i * V::kLanes, sums[i]);
}

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

// The scores of positions begin .. end - 1 and beyond up to whole vectors; `begin` is a multiple of
// kLanes.
template <class V, class Format>
void score_span(const AttendTask& task, const float* query, int64_t begin, int64_t end,
                float* scores) {
  const unsigned char* const keys = static_cast<const unsigned char*>(task.keys);
  const int64_t key_bytes = task.key_stride * Format::kBytes;
  const auto scale = V::broadcast(task.scale);
  for (int64_t t = begin; t < end; t += V::kLanes) {
    // Copies of the last key follow it.
    const unsigned char* of_lane[V::kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < V::kLanes; ++i)
      of_lane[i] = keys + (t + i < end ? t + i : end - 1) * key_bytes;
    typename V::F found = V::multiply(score<V, Format>(query, of_lane, task.head_dim), scale);
    if (task.softcap > 0) found = capped<V>(found, task.softcap);
    V::store(scores + t, found);
  }
}

// Turns scores into e^(score - the highest one); returns one divided by their sum.
template <class V>
float soften(float* scores, int64_t n) {
  using F = typename V::F;
  constexpr int64_t kLanes = V::kLanes;
  const int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t t = n; t < whole; ++t) scores[t] = -__builtin_inff();
  F top = V::broadcast(-__builtin_inff());
  for (int64_t t = 0; t < whole; t += kLanes)
    top = V::max(top, Float32::load(bytes_of(scores + t)));
  float lanes[kLanes];
  V::store(lanes, top);
  float highest = lanes[0];
  for (int i = 1; i < kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
  const F base = V::broadcast(highest);
  F sum = V::broadcast(0.0f);
  for (int64_t t = 0; t < whole; t += kLanes) {
    const F e = exponential<V>(V::subtract(Float32::load(bytes_of(scores + t)), base));
    V::store(scores + t, e);
    sum = V::add(sum, e);
  }
  return 1.0f / sum_of_lanes<V>(sum);
}

// out += the sum of the values of positions begin .. end - 1 times their weights
template <class V, class Format>
void weigh_span(const AttendTask& task, const float* weights, int64_t begin, int64_t end,
                float* out) {
  constexpr int64_t kLanes = V::kLanes;
  const int64_t stride = task.value_stride * Format::kBytes, n = end - begin;
  const unsigned char* values = static_cast<const unsigned char*>(task.values) + begin * stride;
  weights += begin;
  int64_t d = 0;
  const auto skip = [&](int64_t elements) {
    d += elements;
    values += elements * Format::kBytes;
  };
  for (; d + 8 * kLanes <= task.head_dim; skip(8 * kLanes))
    add_weighted<V, Format, 8>(weights, n, values, stride, out + d);
  for (; d + 4 * kLanes <= task.head_dim; skip(4 * kLanes))
    add_weighted<V, Format, 4>(weights, n, values, stride, out + d);
  for (; d + kLanes <= task.head_dim; skip(kLanes))
    add_weighted<V, Format, 1>(weights, n, values, stride, out + d);
  if (d == task.head_dim) return;
  const int64_t rest = task.head_dim - d;
  auto sum = load_part<V, Float32>(bytes_of(out + d), rest);
  for (int64_t t = 0; t < n; ++t)
    sum = V::multiply_add(load_part<V, Format>(values + t * stride, rest), V::broadcast(weights[t]),
                          sum);
  float lanes[kLanes];
  V::store(lanes, sum);
  for (int64_t i = 0; i < rest; ++i) out[d + i] = lanes[i];
}

// Some queries at a time. Keys and values come in spans that fit the first-level cache, where all
// these queries read them. The limits of the spans change no sum. A window begins within a vector
// whose positions are multiples of kLanes, so a column's sums depend on its position alone.
template <class V, class Format>
void attend(const AttendTask& task) {
  constexpr int64_t kSpan = 32, kLanes = V::kLanes;
  const int64_t all = task.columns * task.group;
  for (int64_t first = 0; first < all; first += kAttendQueries) {
    const int64_t count = all - first < kAttendQueries ? all - first : kAttendQueries;
    const float* queries[kAttendQueries];
    float* outs[kAttendQueries];
    int64_t begins[kAttendQueries], ends[kAttendQueries];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = (first + i) / task.group, head = (first + i) % task.group * task.head_dim;
      queries[i] = task.queries + j * task.query_stride + head;
      outs[i] = task.out + j * task.out_stride + head;
      ends[i] = task.positions + j;
      begins[i] = task.window > 0 && task.window < ends[i] ? ends[i] - task.window : 0;
    }
    const int64_t last = ends[count - 1], stride = last + kLanes;
    const int64_t span = count > 1 ? kSpan : (last + kSpan - 1) / kSpan * kSpan;
    const int64_t nearest = begins[0] / kSpan * kSpan;
    const auto later = [](int64_t a, int64_t b) { return a > b ? a : b; };
    const auto earlier = [](int64_t a, int64_t b) { return a < b ? a : b; };
    for (int64_t t = nearest; t < last; t += span) {
      for (int64_t i = 0; i < count; ++i)
        score_span<V, Format>(task, queries[i], later(t, begins[i] / kLanes * kLanes),
                              earlier(ends[i], t + span), task.scratch + i * stride);
    }
    float factors[kAttendQueries];
    for (int64_t i = 0; i < count; ++i) {
      float* const scores = task.scratch + i * stride;
      const int64_t vector = begins[i] / kLanes * kLanes;
      for (int64_t t = vector; t < begins[i]; ++t) scores[t] = -__builtin_inff();
      factors[i] = soften<V>(scores + vector, ends[i] - vector);
      for (int64_t d = 0; d < task.head_dim; ++d) outs[i][d] = 0.0f;
    }
    for (int64_t t = nearest; t < last; t += span) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = later(t, begins[i]), end = earlier(ends[i], t + span);
        if (begin < end)
          weigh_span<V, Format>(task, task.scratch + i * stride, begin, end, outs[i]);
      }
    }
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < task.head_dim; ++d) outs[i][d] *= factors[i];
  }
}

template <class V>
constexpr DecoderKernels decoder_table() {
  return {product<V, typename V::Weights8>,
          product<V, typename V::Weights16>,
          product<V, typename V::Weights32>,
          rms_norm<V>,
          activate<V>,
          attend<V, Float32>,
          attend<V, BFloat16>};
}

}  // namespace
}  // namespace pipespec::cpu
