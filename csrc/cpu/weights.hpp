// The weights of a decoder, packed in the order of a forward: panels of 16 outputs, each of one
// type.
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
  Matrix qkv, o, gate_up, down;
  Norm input_norm, post_norm, o_norm, down_norm, side_norm, q_norm, k_norm;
  std::vector<float> sinks;
  bool is_gated;
  int64_t window, rope;
  bool adds_to_norm;
  HeadNorms head_norms;
  ExpertLayer experts;
  RecurrentLayer recurrent;
  LatentLayer latent;
  bool gates_attention;
  int64_t store;  // number among the layers of its kind, with keys and values or with states
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
