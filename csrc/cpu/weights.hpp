// The weights of a decoder, packed in the order of a forward: panels of 16 outputs, each of one
// type.
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

struct Norm {
  std::vector<float> weight, bias;  // without a weight: there is no norm
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  Norm input_norm, post_norm, o_norm, down_norm, side_norm, q_norm, k_norm;
  std::vector<float> sinks;
  bool is_gated;
  int64_t window, rope;
  bool adds_to_norm;
  HeadNorms head_norms;
};

struct PackedWeights {
  std::vector<Layer> layers;
  Matrix head;
  Norm norm;
  int weight_bits = 32;  // of the weights that are not in blocks
  int64_t bytes = 0;
  Arena arena;

  PackedWeights(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                const EndWeights& ends, int threads);
};

float value(const Weights& weights, int64_t i);

}  // namespace pipespec::cpu
