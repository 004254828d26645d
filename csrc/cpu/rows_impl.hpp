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

// Outputs of a tile of `columns`: with more rows at a time, more lines are in flight.
template <class V>
constexpr int tile_outputs(int64_t columns) {
  return 2 * columns <= V::kTileColumns ? 8 : 4;
}

// The most columns of one pass over a panel, and inputs of a part.
inline constexpr int64_t kPassColumns = 48, kPartInputs = 1024;

// sums[o, c, lane] += products of some inputs, or =.
struct RowTile {
  const unsigned char* rows[8];
  const unsigned char* ahead[8];  // rows that are read afterwards
  int64_t inputs;
  const float* x;
  int64_t x_stride;
  float* sums;
  bool is_first;
};

// The inputs after the last whole vector.
template <class V, class Weights>
void multiply_rest(const RowTile& tile, int64_t columns) {
  const int64_t k = tile.inputs / V::kLanes * V::kLanes, rest = tile.inputs - k;
  float* sums = tile.sums;
  for (int o = 0; o < tile_outputs<V>(columns); ++o) {
    const auto weights = load_part<V, Weights>(tile.rows[o] + k * Weights::kBytes, rest);
    for (int64_t c = 0; c < columns; ++c, sums += V::kLanes) {
      const auto x = load_part<V, Float32>(bytes_of(tile.x + c * tile.x_stride + k), rest);
      V::store(sums, V::multiply_add(weights, x, Float32::load(bytes_of(sums))));
    }
  }
}

// Each row asks for a line of a row ahead as often as it reads one: that keeps more lines in flight
// than the hardware, which stops at each page, and needs no room in the first-level cache.
template <class V, class Weights, int kColumns>
void multiply_rows(const RowTile& tile) {
  using F = typename V::F;
  constexpr int kOutputs = tile_outputs<V>(kColumns);
  constexpr int64_t kLanes = V::kLanes, kLine = 64 / Weights::kBytes;
  const int64_t whole = tile.inputs / kLanes * kLanes, x_stride = tile.x_stride;
  const float* const x = tile.x;
  const unsigned char *rows[kOutputs], *ahead[kOutputs];
  F sums[kOutputs][kColumns];
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o) {
    rows[o] = tile.rows[o], ahead[o] = tile.ahead[o];
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c)
      sums[o][c] = tile.is_first ? V::broadcast(0.0f)
                                 : Float32::load(bytes_of(tile.sums + (o * kColumns + c) * kLanes));
  }
// With 16 registers, that would move sums to the stack.
#ifdef __AVX512F__
#pragma GCC unroll 2
#endif
  for (int64_t k = 0; k < whole; k += kLanes) {
    if (k % kLine == 0) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(ahead[o] + k * Weights::kBytes, 0, 2);
    }
    F inputs[kColumns];
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c) inputs[c] = Float32::load(bytes_of(x + c * x_stride + k));
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      const F weights = Weights::load(rows[o] + k * Weights::kBytes);
#pragma GCC unroll 6
      for (int c = 0; c < kColumns; ++c) {
        sums[o][c] = V::multiply_add(weights, inputs[c], sums[o][c]);
        V::pin(sums[o][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int o = 0; o < kOutputs; ++o)
#pragma GCC unroll 6
    for (int c = 0; c < kColumns; ++c)
      V::store(tile.sums + (o * kColumns + c) * kLanes, sums[o][c]);
  if (whole < tile.inputs) multiply_rest<V, Weights>(tile, kColumns);
}

template <class V, class Weights, int kColumns = V::kTileColumns>
auto find_tile(int64_t columns) {
  if constexpr (kColumns > 1) {
    if (columns < kColumns) return find_tile<V, Weights, kColumns - 1>(columns);
  }
  return multiply_rows<V, Weights, kColumns>;
}

// A panel times up to kPassColumns columns. `next`: the panel that is read afterwards.
template <class V, class Weights>
void panel_product(const RowPanel& panel, const RowPanel& next, int64_t inputs, const float* x,
                   int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
  constexpr int64_t kLanes = V::kLanes, kPanelLanes = kPanelOutputs * kLanes;
  const int64_t tiles = (columns + V::kTileColumns - 1) / V::kTileColumns;
  const auto first = [&](int64_t t) { return columns * t / tiles; };
  // Of an output that a panel lacks, the last row.
  const auto row = [inputs](const RowPanel& of, int64_t output, int64_t k) {
    const int64_t at = output < of.count ? output : of.count - 1;
    return of.rows + (at * inputs + k) * Weights::kBytes;
  };
  alignas(64) float sums[kPassColumns * kPanelLanes];
  const int64_t part = tiles == 1 ? inputs : kPartInputs;
  for (int64_t k = 0; k < inputs; k += part) {
    const int64_t after = k + part < inputs ? k + part : 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t width = first(t + 1) - first(t);
      const int64_t outputs = tile_outputs<V>(width);
      RowTile tile;
      tile.inputs = inputs - k < part ? inputs - k : part;
      tile.x = x + first(t) * x_stride + k, tile.x_stride = x_stride;
      tile.sums = sums + first(t) * kPanelLanes;
      tile.is_first = k == 0;
      for (int64_t o = 0; o < kPanelOutputs; o += outputs) {
        for (int64_t i = o; i < o + outputs; ++i) {
          tile.rows[i - o] = row(panel, i, k);
          const int64_t below = i + outputs;
          tile.ahead[i - o] = below < kPanelOutputs
                                  ? row(panel, below, k)
                                  : row(after != 0 ? panel : next, below - kPanelOutputs, after);
        }
        find_tile<V, Weights>(width)(tile);
        tile.sums += outputs * width * kLanes;
      }
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
