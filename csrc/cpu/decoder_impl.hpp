// The algorithms behind decoder_kernels.hpp, written once over a vector type. Included by each
// decoder_*.cpp and by nothing else; in an unnamed namespace, see span_impl.hpp.
//
// A product keeps one accumulator per output and row, so that the sum over the inputs has one
// order. The latency of the additions is hidden by working on several panels for one row, and on
// several rows for one panel. Weights are expanded once for all rows of a block. Blocks that share
// weights take turns on so few inputs that the weights come from memory once.
#pragma once

#include <stdint.h>

#include "attend_impl.hpp"
#include "decoder_kernels.hpp"
#include "exponential.hpp"
#include "lanes.hpp"

namespace pipespec::cpu {
namespace {

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

template <class V>
void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps,
                float* out) {
  using F = typename V::F;
  F sum = V::broadcast(0.0f);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) sum = V::add(sum, Float32::load(bytes_of(x + i)));
  if (i < n) sum = V::add(sum, load_part<V, Float32>(bytes_of(x + i), n - i));
  const float mean = sum_of_lanes<V>(sum) / float(n);
  for (i = 0; i < n; ++i) out[i] = x[i] - mean;
  const float factor = inverse_rms<V>(out, n, eps);
  for (i = 0; i < n; ++i) out[i] = out[i] * factor * weight[i];
  for (i = 0; bias != nullptr && i < n; ++i) out[i] += bias[i];
}

template <class V>
void cap(float* x, int64_t n, float limit) {
  for (int64_t i = 0; i < n; i += V::kLanes)
    V::store(x + i, capped<V>(Float32::load(bytes_of(x + i)), limit));
}

// x / (1 + e^-z)
template <class V>
inline typename V::F times_sigmoid(typename V::F x, typename V::F z) {
  const auto e = exponential<V>(V::subtract(V::broadcast(0.0f), z));
  return V::divide(x, V::add(V::broadcast(1.0f), e));
}

template <class V>
void activate(Activation kind, const float* products, bool is_gated, int64_t panels, float* out) {
  using F = typename V::F;
  const int64_t step = (is_gated ? 2 : 1) * kPanelOutputs;
  float ones[kPanelOutputs];
  for (float& one : ones) one = 1.0f;
  for (int64_t p = 0; p < panels; ++p, products += step, out += kPanelOutputs) {
    const float* const gate = products;
    const float* const up = is_gated ? products + kPanelOutputs : ones;
    if (kind == Activation::kGelu) {
      for (int64_t i = 0; i < kPanelOutputs; ++i)
        out[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.707106781f)) * up[i];
      continue;
    }
    for (int64_t i = 0; i < kPanelOutputs; i += V::kLanes) {
      const F g = Float32::load(bytes_of(gate + i));
      if (kind == Activation::kRelu2) {
        const F positive = V::max(g, V::broadcast(0.0f));
        V::store(out + i,
                 V::multiply(V::multiply(positive, positive), Float32::load(bytes_of(up + i))));
        continue;
      }
      F z = g;
      if (kind == Activation::kQuickGelu) {
        z = V::multiply(g, V::broadcast(1.702f));
      } else if (kind == Activation::kGeluTanh) {
        // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
        const F cube = V::multiply(V::multiply(g, g), g);
        z = V::multiply(V::multiply_add(cube, V::broadcast(0.044715f), g),
                        V::broadcast(1.59576912f));
      }
      V::store(out + i, V::multiply(times_sigmoid<V>(g, z), Float32::load(bytes_of(up + i))));
    }
  }
}

template <class V>
constexpr DecoderKernels decoder_table() {
  return {product<V, typename V::Weights8>,
          product<V, typename V::Weights16>,
          product<V, typename V::Weights32>,
          rms_norm<V>,
          layer_norm<V>,
          activate<V>,
          cap<V>,
          attend_kernels<V, SingleSteps<V>>(),
          attend_kernels<V, HalfSteps<V>>()};
}

}  // namespace
}  // namespace pipespec::cpu
