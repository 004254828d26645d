// Row selection on the host, greedy and coupled (sampled), and verification, over logits[B, Q, V].
//
// Plain pointers and strides in, int32 out; no torch, no Python. Strides count elements, not bytes,
// and may be any number (0 and negative too); the vocabulary itself is contiguous. Only the
// described elements are read. As in torch.argmax, the lowest id of equal values wins, -0.0 equals
// +0.0, and a NaN counts as larger than everything, the first NaN before the others.
//
// Instructions are chosen at run time, best first: AVX-512 (and AMX, for products with packed
// weights), AVX2, portable, or on 64-bit ARM NEON with dot products of bytes (of packed weights),
// NEON, portable; PIPESPEC_SIMD=portable|avx2|avx512|amx|neon|dotprod overrides. `threads` is an
// upper bound (the caller included); small work stays in the caller. All functions may be called
// from several threads at once. They throw std::invalid_argument before anything is written.
#pragma once

#include <cstdint>
#include <string>

#include "number.hpp"

namespace pipespec::cpu {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct Logits {
  const void* data;
  DType dtype;
  int64_t batch, width, vocab;         // B, Q >= 0; 1 <= V < 2^31
  int64_t batch_stride, width_stride;  // in elements
};

struct Tokens {
  const void* data;  // [B, Q]
  int item_bytes;    // 4 or 8: int32 or int64
  int64_t batch_stride, width_stride;

  int64_t at(int64_t b, int64_t q) const {
    const int64_t i = b * batch_stride + q * width_stride;
    return item_bytes == 4 ? static_cast<const int32_t*>(data)[i]
                           : static_cast<const int64_t*>(data)[i];
  }
};

// Coupled selection. The choice in column q of row b is the id v with the largest
//   logit[v] * inv_temperature[b] + G(seeds[b], positions[b] + q, v),
// computed in fp32, the product rounded before the sum; G is the Gumbel noise of
// protocol/gumbel.hpp over the random numbers of protocol/philox.hpp. That is a draw from the
// softmax, and two models that draw with the same noise mostly draw the same id (Daliri, Musco,
// Suresh 2024, arXiv 2408.07978).
//
// Logits below the cutoff are not selectable (a NaN is not below anything). Of equal sums the
// lowest id wins, the first NaN before everything; where nothing is selectable but -inf, id 0. The
// result depends on the values above only: not on threads, instructions, strides or other rows.
struct Noise {
  const uint64_t* seeds;         // [B]
  const int64_t* positions;      // [B], >= 0: in its sequence, of the token that column 0 chooses
  const float* inv_temperature;  // [B], finite and positive
  const float* cutoff;           // [B, Q] contiguous; null: none
  uint32_t stream;               // Stream of philox.hpp; kTargetStream for draft and target alike
};

// selected[B, Q] (contiguous): the id of the largest logit of each row.
void argmax(const Logits& logits, int32_t* selected, int threads);

// The same, coupled: each row of logits by itself.
void sample(const Logits& logits, const Noise& noise, int32_t* selected, int threads);

// Verification, greedy or, with `noise`, coupled. In coupled verification "the argmax of" means
// "the choice from". Row r of the batch was fed tokens[r, 0 .. query_lens[r]-1], of which the last
// num_draft_tokens[r] are draft tokens. With s = query_lens[r] - 1 - num_draft_tokens[r],
// selected[r, j] is the argmax of logits[r, s + j] for j = 0 .. accepted[r]; the walk continues
// while selected[r, j] == tokens[r, s + 1 + j] and draft tokens are left. Logits after the first
// mismatch are not read. Entries of selected[B, Q] (contiguous) past accepted[r] are -1. A row with
// query_lens[r] == 0 idles: all -1, accepted 0, its num_draft_tokens ignored. Counts outside 0 <=
// num_draft_tokens < query_lens <= Q are an error.
void verify(const Logits& logits, const Tokens& tokens, const int32_t* query_lens,
            const int32_t* num_draft_tokens, int32_t* selected, int32_t* accepted, int threads,
            const Noise* noise = nullptr);

// out[i] = the noise of id begin + i, as the instructions in use compute it. For tests.
void gumbel_noise(uint64_t seed, int64_t position, uint32_t stream, int64_t begin, int64_t count,
                  float* out);

// The checks that all of these begin with.
void check(const Logits& logits, int threads);
void check(const Tokens& tokens);
void check_counts(const Logits& logits, const int32_t* query_lens, const int32_t* num_draft_tokens);
void check_noise(const Logits& logits, const Noise& noise, int64_t row);
void check_scale(float inv_temperature, int64_t row, const char* name);
int64_t item_bytes(DType dtype);  // refuses unknown codes

// The instructions in use: a name of PIPESPEC_SIMD. set_simd is for tests and benchmarks; it
// returns the previous name and refuses what this CPU, its operating system or the compiler lacks.
std::string simd();
std::string set_simd(const std::string& name);

}  // namespace pipespec::cpu
