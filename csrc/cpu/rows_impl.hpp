// Products with rows of weights that lie as a model has them, written once over a vector type. In
// an unnamed namespace, see span_impl.hpp.
//
// Lane l sums the products of the inputs l, l + V::kLanes, ... in their order, and the lanes of an
// output are added at the end, halves first. A tile of some outputs and columns is in registers.
// Several tiles take turns on parts of the inputs, and leave their sums in memory meanwhile: that
// changes when a product is added, and not the order of a lane's sum.
#pragma once

#include <stdint.h>

#include "decoder_kernels.hpp"
#include "lanes.hpp"

namespace pipespec::cpu {
namespace {

// Outputs of a tile of so many columns.
template <class V>
constexpr int tile_outputs(int columns) {
  return 2 * columns <= V::kTileColumns ? 8 : 4;
}

// One column reads rows of up to so many inputs one at a time: its inputs stay in the first-level
// cache. The sum of one row computes as fast as memory is read, so that no loads wait for lines
// that are on their way, in the place of requests for others.
inline constexpr int64_t kSingleRow = 5120;

// How far ahead lines are asked for, at least, unless a panel is shorter.
inline constexpr int64_t kAheadBytes = 8192;

// The most columns of one pass over a panel, and inputs of a part.
inline constexpr int64_t kPassColumns = 48, kPartInputs = 1024;

// The rows of a panel, some inputs and some columns: sums[o, c, lane] += products, or =.
struct PanelPart {
  const unsigned char* rows;
  const unsigned char* next;  // rows that are read afterwards
  int64_t row_bytes, count;   // without row number `count`, the last one is read again
  int64_t inputs;
  const float* x;
  int64_t x_stride;
  float* sums;
  bool is_first;
  bool is_whole;  // all inputs

  const unsigned char* row(int64_t o) const {
    return rows + (o < count ? o : count - 1) * row_bytes;
  }
};

// Inputs of a cache line of weights: what a tile reads of each row in one step.
template <class Weights>
inline constexpr int64_t kLineInputs = 64 / Weights::kBytes;

// The inputs after the last whole line, of rows o .. o + kOutputs - 1.
template <class V, class Weights, int kColumns, int kOutputs>
void multiply_rest(const PanelPart& part, int64_t begin, int64_t o, float* sums) {
  for (int64_t k = begin; k < part.inputs; k += V::kLanes) {
    const int64_t rest = part.inputs - k < V::kLanes ? part.inputs - k : V::kLanes;
    float* to = sums;
    for (int64_t i = o; i < o + kOutputs; ++i) {
      const auto weights = load_part<V, Weights>(part.row(i) + k * Weights::kBytes, rest);
      for (int c = 0; c < kColumns; ++c, to += V::kLanes) {
        const auto x = load_part<V, Float32>(bytes_of(part.x + c * part.x_stride + k), rest);
        V::store(to, V::multiply_add(weights, x, Float32::load(bytes_of(to))));
      }
    }
  }
}

// Asks for a line of rows ahead as often as it reads one: that keeps more lines in flight than the
// hardware, which stops at each page. They come to the second-level cache: the first one has no
// room for them. Whole rows are asked for one after the other, as they lie in memory, and parts of
// rows side by side.
template <class V, class Weights, int kColumns, int kOutputs>
void multiply_rows(const PanelPart& part) {
  using F = typename V::F;
  constexpr int64_t kLanes = V::kLanes, kLine = kLineInputs<Weights>;
  const int64_t whole = part.inputs / kLine * kLine, x_stride = part.x_stride;
  const int64_t ahead_stride = part.is_whole ? 64 : part.row_bytes;
  const int64_t ahead_step = part.is_whole ? kOutputs * 64 : 64;
  const int64_t step_bytes = kOutputs * part.inputs * Weights::kBytes;
  const int64_t steps = 1 + (kAheadBytes - 1) / step_bytes;
  const int64_t distance = kOutputs * steps < kPanelOutputs ? kOutputs * steps : kPanelOutputs;
  const float* const x = part.x;
  float* to = part.sums;
  for (int64_t first = 0; first < kPanelOutputs; first += kOutputs) {
    const int64_t below = first + distance;
    const unsigned char* ahead = below < kPanelOutputs
                                     ? part.rows + below * part.row_bytes
                                     : part.next + (below - kPanelOutputs) * part.row_bytes;
    const unsigned char* rows[kOutputs];
    F sums[kOutputs][kColumns];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      rows[o] = part.row(first + o);
#pragma GCC unroll 6
      for (int c = 0; c < kColumns; ++c)
        sums[o][c] = part.is_first ? V::broadcast(0.0f)
                                   : Float32::load(bytes_of(to + (o * kColumns + c) * kLanes));
    }
    for (int64_t k = 0; k < whole; k += kLine, ahead += ahead_step) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(ahead + o * ahead_stride, 0, 2);
// With 16 registers, more would move sums to the stack.
#if defined(__AVX512F__) || defined(__aarch64__)
#pragma GCC unroll 4
#else
#pragma GCC unroll 1
#endif
      for (int64_t at = k; at < k + kLine; at += kLanes) {
        F inputs[kColumns];
#pragma GCC unroll 6
        for (int c = 0; c < kColumns; ++c)
          inputs[c] = Float32::load(bytes_of(x + c * x_stride + at));
#pragma GCC unroll 8
        for (int o = 0; o < kOutputs; ++o) {
          const F weights = Weights::load(rows[o] + at * Weights::kBytes);
#pragma GCC unroll 6
          for (int c = 0; c < kColumns; ++c) {
            sums[o][c] = V::multiply_add(weights, inputs[c], sums[o][c]);
            V::pin(sums[o][c]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o)
#pragma GCC unroll 6
      for (int c = 0; c < kColumns; ++c) V::store(to + (o * kColumns + c) * kLanes, sums[o][c]);
    if (whole < part.inputs) multiply_rest<V, Weights, kColumns, kOutputs>(part, whole, first, to);
    to += kOutputs * kColumns * kLanes;
  }
}

using MultiplyRows = void (*)(const PanelPart& part);

template <class V, class Weights, int kColumns = V::kTileColumns>
MultiplyRows find_tile(int64_t columns) {
  if constexpr (kColumns > 1) {
    if (columns < kColumns) return find_tile<V, Weights, kColumns - 1>(columns);
  }
  return multiply_rows<V, Weights, kColumns, tile_outputs<V>(kColumns)>;
}

// A panel times up to kPassColumns columns. `next`: the panel that is read afterwards.
template <class V, class Weights>
void panel_product(const RowPanel& panel, const RowPanel& next, int64_t inputs, const float* x,
                   int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
  constexpr int64_t kLanes = V::kLanes, kPanelLanes = kPanelOutputs * kLanes;
  const int64_t tiles = (columns + V::kTileColumns - 1) / V::kTileColumns;
  const auto first = [&](int64_t t) { return columns * t / tiles; };
  alignas(64) float sums[kPassColumns * kPanelLanes];
  const bool is_single = columns == 1 && inputs <= kSingleRow;
  const int64_t row_bytes = inputs * Weights::kBytes, most = tiles == 1 ? inputs : kPartInputs;
  for (int64_t k = 0; k < inputs; k += most) {
    const int64_t after = k + most < inputs ? k + most : 0;
    PanelPart part;
    part.rows = panel.rows + k * Weights::kBytes;
    part.next = (after != 0 ? panel : next).rows + after * Weights::kBytes;
    part.row_bytes = row_bytes, part.count = panel.count;
    part.inputs = inputs - k < most ? inputs - k : most;
    part.is_first = k == 0;
    part.x_stride = x_stride;
    part.is_whole = tiles == 1;
    for (int64_t t = 0; t < tiles; ++t) {
      part.x = x + first(t) * x_stride + k;
      part.sums = sums + first(t) * kPanelLanes;
      const MultiplyRows multiply = is_single ? multiply_rows<V, Weights, 1, 1>
                                              : find_tile<V, Weights>(first(t + 1) - first(t));
      multiply(part);
    }
  }
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t width = first(t + 1) - first(t);
    const float* const from = sums + first(t) * kPanelLanes;
    for (int64_t c = 0; c < width; ++c, out += out_stride) {
      for (int64_t i = 0; i < kPanelOutputs; i += kLanes) {
        typename V::F of_outputs[kLanes];
        for (int64_t j = 0; j < kLanes; ++j)
          of_outputs[j] = Float32::load(bytes_of(from + ((i + j) * width + c) * kLanes));
        V::store(out + i, V::sum_each(of_outputs));
      }
      for (int64_t i = panel.count; i < kPanelOutputs; ++i) out[i] = 0.0f;
    }
  }
}

template <class V, class Weights>
void product(const RowPanel* panels, int64_t panel_count, const RowPanel& after, int64_t inputs,
             const float* x, int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
  const int64_t passes = (columns + kPassColumns - 1) / kPassColumns;
  for (int64_t i = 0; i < passes; ++i) {
    const int64_t begin = columns * i / passes, width = columns * (i + 1) / passes - begin;
    for (int64_t p = 0; p < panel_count; ++p) {
      const RowPanel& next = p + 1 < panel_count ? panels[p + 1] : after;
      panel_product<V, Weights>(panels[p], next, inputs, x + begin * x_stride, x_stride, width,
                                out + begin * out_stride + p * kPanelOutputs, out_stride);
    }
  }
}

}  // namespace
}  // namespace pipespec::cpu
