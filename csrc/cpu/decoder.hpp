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
#include "select.hpp"

namespace pipespec::cpu {

struct DecoderShape {
  int64_t hidden, intermediate, heads, kv_heads, head_dim, vocabulary, rotary_dim;
  float eps, scale;
  Activation activation;
  float norm_offset;  // added to the weights of all RMS norms
};

// Contiguous, float32 or bfloat16; null data: there is none. With a format the data of a matrix are
// its blocks, with a scale per output they are int8, whatever the dtype says.
struct Weights {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  const float* scale = nullptr;
  std::optional<Format> format = {};
};

// Matrices are [outputs, inputs]. With a `side_norm`, q, k and v read 2 * H inputs: side inputs and
// hidden state, each normalised.
struct LayerWeights {
  Weights input_norm, q, k, v, o, post_norm, gate, up, down;
  Weights q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  Weights q_norm, k_norm, side_norm;
  int64_t window = 0;         // last positions that a column sees, its own included; 0: all
  bool adds_to_norm = false;  // the residual of a layer with side inputs is the normalised state
};

struct EndWeights {
  Weights embedding;  // blocks that are those of the head are read there
  Weights norm, head, head_bias;
};

// Keys and values of all layers; strides in elements of layer, row, head and position. The
// elements of a head are contiguous.
struct KeysValues {
  void* keys;
  void* values;
  DType dtype;  // kFloat32 or kBFloat16
  int64_t key_strides[4], value_strides[4];
};

// Rows of `columns` tokens each. Column j of row r stands at position lengths[r] + j and sees the
// positions up to its own, of these the last ones that a layer's window holds.
struct Columns {
  int64_t rows, columns;
  const int64_t* lengths;
  const float* cos;  // [positions, rotary_dim]
  const float* sin;
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
  // what layers with a side_norm read, too.
  void run_layers(float* hidden, const float* side, const KeysValues& cache, const Columns& columns,
                  int64_t begin, int64_t end, int threads, const Taps& taps = {}) const;
  // logits[count, V] of hidden[count, H].
  void logits(const float* hidden, int64_t count, void* out, DType dtype, int threads) const;
  // All of these: logits[rows, keep, V] of the last `keep` columns.
  void step(const Tokens& tokens, const KeysValues& cache, const Columns& columns, int64_t keep,
            void* out, DType dtype, int threads, const Taps& taps = {}) const;

 private:
  struct Job;

  void embed_one(int64_t id, float* to) const;
  // Layers and, with a head, the logits of the last `keep` columns, some columns at a time.
  void run_pieces(Job& job, const Columns& columns, int64_t keep, int64_t begin, int64_t end,
                  bool has_head) const;

  DecoderShape shape_;
  Weights embedding_;
  bool embeds_from_head_;
  std::unique_ptr<PackedWeights> packed_;
};

}  // namespace pipespec::cpu
