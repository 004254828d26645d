// The forward of LLaMA-like decoders on the host: tokens or hidden states in, logits or hidden
// states out, keys and values appended to storage with a length per row.
//
// Matrices of numbers are read where they lie, int8, bfloat16 or float32, and must stay there;
// float32 ones whose values bfloat16 represents are copied as such if there is room. Those in
// blocks are copied into panels that one pass reads front to back (formats/). Arithmetic is
// float32, but products with blocks are those of formats/packed.hpp. Each number is computed by the
// same sequence of operations whatever the number of rows, columns or threads: q forwards of one
// column and one forward of q columns give the same bits. Other instructions (set_simd) may round
// differently outside of such products.
//
// Instructions and threads are those of select.hpp. A Decoder may be used by several threads at
// once, as long as they write to different rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decoder_kernels.hpp"
#include "formats/packed.hpp"
#include "routing.hpp"
#include "select.hpp"

namespace pipespec::cpu {

enum class NormKind : int { kRms = 0, kLayer = 1 };

struct DecoderShape {
  int64_t hidden, intermediate, heads, kv_heads, head_dim, vocabulary, rotary_dim;
  float eps, scale;
  Activation activation;
  float norm_offset;  // added to the weights of all norms
  NormKind norm = NormKind::kRms;
  bool rotates_pairs = false;   // neighbours are rotated; else elements i and i + rotary_dim / 2
  bool norms_rotated = false;   // queries and keys are normalised after their rotation
  bool is_parallel = false;     // attention and feed-forward read the same hidden state
  float softcap = 0.0f;         // of attention scores, as in AttendTask
  float residual_scale = 1.0f;  // of what attention and feed-forward add
  float embedding_scale = 1.0f, logit_scale = 1.0f;
  float logit_softcap = 0.0f;  // after the scale; 0: none
  // The first elements of a key, which are its value, too, with the rotated part behind them; 0:
  // keys and values differ.
  int64_t latent = 0;
  int64_t per_layer = 0;  // inputs of each layer beside the hidden state; 0: none
  // Factors of these inputs: of their embeddings, of what the embedding of the token gives, of the
  // sum of both.
  float per_layer_scale = 1.0f, per_layer_in_scale = 1.0f, per_layer_sum_scale = 1.0f;
};

// Of one layer; those of the decoder's shape where it says no others. Of a shape, rotary_dim is the
// largest of all layers.
struct LayerSizes {
  int64_t intermediate, kv_heads, head_dim, rotary_dim;
};

// Contiguous, float32 or bfloat16; null data: there is none. With a format the data of a matrix are
// its blocks, with a scale per output they are int8, whatever the dtype says. With an `order` the
// rows of a matrix are those of these numbers among `stored` rows; the 16 of a panel are
// neighbours.
struct Weights {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  const float* scale = nullptr;
  std::optional<Format> format = {};
  const int64_t* order = nullptr;
  int64_t stored = 0;
};

// The experts of a feed-forward, in place of its gate, up and down. Those of all experts lie one
// after the other: the rows of expert e begin at e * stride, of `up` after up_first more. A bias
// has an entry for each row of its matrix.
struct ExpertWeights {
  Routing routing;
  int64_t intermediate = 0, shared_intermediate = 0;  // 0 of the latter: no shared expert
  int64_t stride = 0, up_first = 0;                   // in rows
  float limit = 0.0f;                                 // see ExpertLayer
  Weights router, router_bias, choice_bias;           // [experts, H], [experts]; float32 [experts]
  Weights gate, up, down, gate_bias, up_bias, down_bias;
  Weights shared_gate, shared_up, shared_down, shared_router;  // the last one: [1, H], or none
};

// Heads of queries and keys, and of values: each of the former serves several of the latter. A
// short convolution has none. Tiled: what `out` reads goes by the place of a head in its group.
struct DeltaShape {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  bool is_tiled = false;
  int64_t group() const { return value_heads / key_heads; }
  int64_t output(int64_t head) const {
    return is_tiled ? head % group() * key_heads + head / group() : head;
  }
};

// A recurrent part in place of the attention. The rows of `in` are the channels of the convolution:
// queries, keys and values; of a short convolution a factor of its inputs, one of its outputs, and
// the inputs. The others are those of a gated delta net.
struct RecurrentWeights {
  DeltaShape delta;
  int64_t channels = 0, taps = 0;                  // 0: the layer has attention
  Weights in, gates, beta, decay, out;             // [.., H] each, and [H, ..]
  Weights in_bias, out_bias, kernel, kernel_bias;  // kernel: [channels, taps]
  Weights decay_log, decay_bias, norm;             // [value_heads] twice, [value_dim]
};

// Latent attention in place of queries, keys and values, see LatentLayer.
struct LatentWeights {
  int64_t plain = 0, value_dim = 0, query_rank = 0;  // 0 of the first one: the layer has none
  float eps = 0.0f;
  Weights query_latents, queries, latents;  // [query_rank, H], [heads * (plain + rotated), ..]
  Weights keys, values;                     // [heads * rank, plain], [heads * value_dim, rank]
  Weights norm, query_norm, latents_bias, query_latents_bias;
};

// What the weights of q_norm and k_norm are for: one head each, the same for all; one head each,
// and each its own; all heads at once.
enum class HeadNorms : int { kShared = 0, kOwn = 1, kJoint = 2 };

// Matrices are [outputs, inputs]. A norm that is not there changes nothing; without a gate the
// activation is that of `up`. Norms stand in front of the attention (input_norm), behind it
// (o_norm), in front of the feed-forward (post_norm; in a parallel layer without it, input_norm)
// and behind that (down_norm). With a `side_norm`, q, k and v read 2 * H inputs: side inputs and
// hidden state, each normalised. Per-layer inputs are factors of what the hidden state gives by
// per_layer_gate and the activation, and per_layer_norm is behind their product with per_layer_out.
struct LayerWeights {
  Weights input_norm, q, k, v, o, post_norm, gate, up, down;
  Weights q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  Weights q_norm, k_norm, side_norm;
  Weights o_norm, down_norm, input_norm_bias, post_norm_bias;
  Weights sinks;                // [heads], see AttendTask
  Weights q_gate, q_gate_bias;  // like q: sigmoids of their products are factors of the attention
  Weights v_norm;               // [head_dim], of the values of a head
  Weights per_layer_gate, per_layer_out, per_layer_norm;  // [P, H], [H, P], [H]
  Weights output_scale;                                   // [1], a factor of the layer's output
  int64_t window = 0;         // last positions that a column sees, its own included; 0: all
  bool adds_to_norm = false;  // the residual of a layer with side inputs is the normalised state
  int64_t rope = 0;           // which of the rotations of Columns; -1: none
  HeadNorms head_norms = HeadNorms::kShared;
  int64_t keys_of = -1;  // the layer whose keys and values it reads; -1: its own
  std::optional<LayerSizes> sizes = {};
  ExpertWeights experts = {};
  RecurrentWeights recurrent = {};
  LatentWeights latent = {};
};

struct EndWeights {
  Weights embedding;  // blocks that are those of the head are read there
  Weights norm, head, head_bias, norm_bias;
  // Of per-layer inputs: [V, per_layer_width], [layers * P, H], [P]. The first ones are of this
  // decoder's layers.
  Weights per_layer_embedding, per_layer_in, per_layer_in_norm;
  int64_t per_layer_width = 0;
};

// Keys and values of all layers that store some of one size; strides in elements of layer, row,
// head and position. The elements of a head are contiguous. With a latent, `keys` are latents, and
// the rotated parts of the same positions, `values`, lie right behind them.
struct KeysValues {
  void* keys;
  void* values;
  DType dtype;  // kFloat32 or kBFloat16
  int64_t key_strides[4], value_strides[4];
};

// The states of all recurrent layers: the last inputs of the convolution [layers, slots, rows,
// channels, taps], and [layers, slots, rows, value_heads, key_dim, value_dim]. A row that is fed
// begins with the states of slot places[0]; those after its column j go to slot places[j], if that
// is not negative. `places`: [rows, columns + 1].
struct States {
  void* inputs;
  DType dtype;  // kFloat32 or kBFloat16
  float* states;
  int64_t slots, rows;
  const int64_t* places;
};

// Rows of `columns` tokens each. Column j of row r stands at position lengths[r] + j and sees the
// positions up to its own, of these the last ones that a layer's window holds.
struct Columns {
  int64_t rows, columns;
  const int64_t* lengths;
  const float* cos;  // [rotations, positions, rotary_dim]; the halves of a row are equal
  const float* sin;
  int64_t positions;
  const float* query_factors = nullptr;  // [positions]; null: all are 1
};

// Copies of hidden states, [layers, H] of each column: those that the layers of these numbers read,
// or the last outputs. Row r begins at out[begin[r]], and its columns follow at `stride` elements.
struct Taps {
  std::vector<int64_t> layers = {};
  void* out = nullptr;
  DType dtype = DType::kFloat32;  // or kBFloat16
  const int64_t* begin = nullptr;
  int64_t stride = 0;
};

struct PackedWeights;

// One for each size, in the order of their first layers.
using Stores = std::vector<KeysValues>;

class Decoder {
 public:
  // `room`: bytes that 16-bit copies of float32 matrices may take.
  Decoder(const DecoderShape& shape, const std::vector<LayerWeights>& layers,
          const EndWeights& ends, int64_t room, int threads);
  ~Decoder();

  int64_t bytes() const;    // of copies of matrices
  int weight_bits() const;  // the most of any matrix that is not in blocks; 0: there is none

  // hidden[count, H] of tokens. Throws std::invalid_argument for an id outside of the vocabulary.
  void embed(const Tokens& tokens, int64_t rows, int64_t columns, float* hidden) const;
  // hidden[rows, columns, H] through layers begin .. end - 1, in place. side[rows, columns, H]:
  // what layers with a side_norm read, too. With per-layer inputs, of which `tokens` are a part,
  // they begin with layer 0.
  void run_layers(float* hidden, const float* side, const Tokens* tokens, const Stores& stores,
                  const Columns& columns, int64_t begin, int64_t end, int threads,
                  const Taps& taps = {}, const States* states = nullptr) const;
  // logits[count, V] of hidden[count, H].
  void logits(const float* hidden, int64_t count, void* out, DType dtype, int threads) const;
  // All of these: logits[rows, keep, V] of the last `keep` columns.
  void step(const Tokens& tokens, const Stores& stores, const Columns& columns, int64_t keep,
            void* out, DType dtype, int threads, const Taps& taps = {},
            const States* states = nullptr) const;

 private:
  struct Job;

  // Throws as embed().
  void check(const Tokens& tokens, int64_t rows, int64_t columns) const;
  void embed_one(int64_t id, float* to) const;
  // What a token gives to the per-layer inputs: [per_layer_width].
  void embed_per_layer(int64_t id, float* to) const;
  // Layers and, with a head, the logits of the last `keep` columns, some columns at a time.
  void run_pieces(Job& job, const Columns& columns, int64_t keep, int64_t begin, int64_t end,
                  bool has_head) const;

  DecoderShape shape_;
  Weights embedding_;
  Weights per_layer_embedding_;
  int64_t per_layer_width_;
  bool embeds_from_head_;
  std::unique_ptr<PackedWeights> packed_;
};

}  // namespace pipespec::cpu
