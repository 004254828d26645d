// The weights of a decoder in the order of a forward: panels of 16 outputs, each of one type.
#pragma once

#include <cstdint>
#include <vector>

#include "arena.hpp"
#include "decoder.hpp"
#include "experts.hpp"
#include "latent.hpp"
#include "recurrent.hpp"

namespace pipespec::cpu {

struct Norm {
  std::vector<float> weight, bias;  // without a weight: there is no norm
};

struct Layer {
  Matrix qkv, o, gate_up, down, per_layer_gate, per_layer_out;
  Norm input_norm, post_norm, o_norm, down_norm, side_norm, q_norm, k_norm, v_norm, per_layer_norm;
  std::vector<float> sinks;
  LayerSizes sizes;
  float output_scale;
  bool is_gated;
  int64_t window, rope;
  bool adds_to_norm;
  HeadNorms head_norms;
  ExpertLayer experts;
  RecurrentLayer recurrent;
  LatentLayer latent;
  bool gates_attention;
  // Number among the layers of its kind: those with states, or in Stores those with keys and values
  // of its size.
  int64_t store, store_kind;
  bool stores_keys;  // else it reads those of another layer
};

// Matrices of numbers are read where they lie, but float32 ones whose values bfloat16 represents:
// their copies have half the size, which is what a product of few columns waits for. The bits are
// the same.
struct PackedWeights {
  std::vector<Layer> layers;
  Matrix head, per_layer_in;
  Norm norm, per_layer_in_norm;
  int weight_bits = 0;  // the most of any matrix that is not in blocks
  int64_t bytes = 0;    // of copies
  Arena panels, narrow;

  // `room`: bytes that narrow copies may take; with less, float32 is read.
  PackedWeights(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                const EndWeights& ends, int64_t room, int threads);
};

float value(const Weights& weights, int64_t i);

}  // namespace pipespec::cpu
