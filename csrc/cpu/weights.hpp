// The weights of a decoder in the order of a forward: panels of 16 outputs, each of one type.
#pragma once

#include <cstdint>
#include <vector>

#include "arena.hpp"
#include "decoder.hpp"
#include "pack.hpp"

namespace pipespec::cpu {

// Parts of some outputs each, one after the other and each in whole panels; and that `groups`
// times: heads of queries, keys and values; elsewhere one part.
struct Matrix {
  int64_t inputs = 0, group_panels = 0, groups = 1;
  std::vector<Run> runs;
  std::vector<float> bias, scale;   // of all panels, or none
  bool rounds[2] = {false, false};  // inputs are read in blocks of 32, of 256
  bool reads_floats = false;

  int64_t panels() const { return groups * group_panels; }
  bool reads_rounded() const { return rounds[0] || rounds[1]; }
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  std::vector<float> input_norm, post_norm, q_norm, k_norm, side_norm;
  int64_t window;
  bool adds_to_norm;
};

// Matrices of numbers are read where they lie, but float32 ones whose values bfloat16 represents:
// their copies have half the size, which is what a product of few columns waits for. The bits are
// the same.
struct PackedWeights {
  std::vector<Layer> layers;
  Matrix head;
  std::vector<float> norm;
  int weight_bits = 0;  // the most of any matrix that is not in blocks
  int64_t bytes = 0;    // of copies
  Arena panels, narrow;

  // `room`: bytes that narrow copies may take; with less, float32 is read.
  PackedWeights(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                const EndWeights& ends, int64_t room, int threads);
};

float value(const Weights& weights, int64_t i);

}  // namespace pipespec::cpu
