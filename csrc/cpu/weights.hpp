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

// Matrices of numbers are read where they lie, but float32 ones whose values bfloat16 represents:
// their copies have half the size, which is what a product of few columns waits for. The bits are
// the same.
struct PackedWeights {
  std::vector<Layer> layers;
  Matrix head;
  Norm norm;
  int weight_bits = 0;  // the most of any matrix that is not in blocks
  int64_t bytes = 0;    // of copies
  Arena panels, narrow;

  // `room`: bytes that narrow copies may take; with less, float32 is read.
  PackedWeights(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
                const EndWeights& ends, int64_t room, int threads);
};

float value(const Weights& weights, int64_t i);

}  // namespace pipespec::cpu
