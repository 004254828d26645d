// The products of attend_impl.hpp: of many queries with packed keys and values, and of a few
// straight from storage. In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

#include "lanes.hpp"

namespace pipespec::cpu {
namespace {

inline constexpr int64_t kAttendChunk = 64;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The three ways to multiply. A step of a product takes kStep elements of a key, or of kStep
// positions, at once. Storage is read in words of 32 bits, which hold kWord elements.

template <class V>
struct SingleSteps {  // float32
  using Format = Float32;
  static constexpr int kStep = 1, kWord = 1;
  static constexpr bool kInPlace = true;  // values are multiplied where they lie

  // The factors of each step of a word.
  static void split(typename V::I word, typename V::F (&to)[1]) { to[0] = V::float_of(word); }
  // Element l of the rows to the step's lane l: kStep vectors of it, where a row has n elements.
  static void join(const unsigned char* const (&rows)[1], int64_t n, typename V::F (&to)[1]) {
    to[0] = load_part<V, Float32>(rows[0], n);
  }
  static typename V::F spread(const float* x) { return V::broadcast(*x); }
  static typename V::F dot(typename V::F a, typename V::F b, typename V::F sum) {
    return V::multiply_add(a, b, sum);
  }
  // What products read in place of n factors a.
  static void round(const float*, int64_t, float*) {}
};

template <class V>
struct HalfSteps : SingleSteps<V> {  // bfloat16 that is multiplied as float32
  using Format = BFloat16;
  static constexpr int kStep = 1, kWord = 2;
  static constexpr bool kInPlace = false;

  static void split(typename V::I word, typename V::F (&to)[2]) {
    to[0] = V::float_of(V::template shift_left<16>(word));
    to[1] = V::float_of(V::bit_and(word, V::broadcast(int32_t(0xFFFF0000))));
  }
  static void join(const unsigned char* const (&rows)[1], int64_t n, typename V::F (&to)[1]) {
    to[0] = load_part<V, BFloat16>(rows[0], n);
  }
};

// out[q, l] = (or +=, unless `fresh`) the sum over the steps of a[q, step] * b[step, l].
struct SmallProduct {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride, steps;
  float* out;
  int64_t out_stride;
  bool fresh;
  const unsigned char* ahead;  // what to ask for with the first step
  int64_t ahead_bytes;         // from one step to the next
};

template <class V, class Steps, int kQueries, int kVectors>
void multiply_tile(const SmallProduct& p) {
  using F = typename V::F;
  const float *const a = p.a, *b = p.b;
  const unsigned char* ahead = p.ahead;
  F sums[kQueries][kVectors];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      sums[q][v] = p.fresh ? V::broadcast(0.0f)
                           : Float32::load(bytes_of(p.out + q * p.out_stride + v * V::kLanes));
  for (int64_t s = 0; s < p.steps; ++s, b += p.b_stride, ahead += p.ahead_bytes) {
    for (int64_t i = 0; i < p.ahead_bytes; i += 64) __builtin_prefetch(ahead + i);
    F packed[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) packed[v] = Float32::load(bytes_of(b + v * V::kLanes));
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const F x = Steps::spread(a + q * p.a_stride + s);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[q][v] = Steps::dot(packed[v], x, sums[q][v]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      V::store(p.out + q * p.out_stride + v * V::kLanes, sums[q][v]);
}

using Tile = void (*)(const SmallProduct&);

template <class V, class Steps, int kQueries, int kVectors>
Tile find_tile(int64_t queries, int64_t vectors) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) return find_tile<V, Steps, kQueries - 1, kVectors>(queries, vectors);
  }
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return find_tile<V, Steps, kQueries, kVectors - 1>(queries, vectors);
  }
  return multiply_tile<V, Steps, kQueries, kVectors>;
}

// Asks for `ahead_bytes` at `ahead` on the way: memory is at work while this computes.
template <class V, class Steps>
void multiply(SmallProduct p, int64_t queries, int64_t vectors) {
  constexpr int kQueries = V::kTileQueries, kVectors = V::kTileVectors;
  const int64_t tiles = (queries + kQueries - 1) / kQueries;
  const int64_t sweeps = tiles * ((vectors + kVectors - 1) / kVectors);
  const unsigned char* const end = p.ahead + p.ahead_bytes;
  p.ahead_bytes = larger(p.ahead_bytes / (sweeps * p.steps), 64);
  for (int64_t v = 0; v < vectors; v += kVectors) {
    const int64_t wide = vectors - v < kVectors ? vectors - v : kVectors;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = queries * i / tiles, count = queries * (i + 1) / tiles - first;
      SmallProduct tile = p;
      tile.a += first * p.a_stride;
      tile.b += v * V::kLanes;
      tile.out += first * p.out_stride + v * V::kLanes;
      if (p.ahead >= end) tile.ahead_bytes = 0;
      find_tile<V, Steps, kQueries, kVectors>(count, wide)(tile);
      p.ahead += tile.ahead_bytes * p.steps;
    }
  }
}

// ---- a few queries

// Queries whose sums are in registers, and those that read keys and values where they lie. For more
// of them packing pays.
inline constexpr int kFewQueries = 8, kUnpackedQueries = 3 * kFewQueries;

// Rows of storage.
struct Rows {
  const unsigned char* at[kAttendChunk];
  int64_t count;
  // What is read next, as far as the product shall ask for it: lines one after the other, since
  // memory is slow for the order in which a product reads its rows.
  mutable const unsigned char* next;
  const unsigned char* end;

  void ask(int64_t lines) const {
    if (next >= end) return;
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + i * 64, 0, 2);
    next += lines * 64;
  }
};

// What a product of a few queries reads and writes, next to the rows. `a` and `out` have a row per
// query, as those of SmallProduct, and so has each sum the order of that product.
struct FewProduct {
  const Rows& rows;
  int64_t head_dim;
  const float* a;
  int64_t a_stride;
  float* out;
  int64_t out_stride;
  bool fresh;
};

// Whether the products below take heads of this size.
template <class V, class Steps>
constexpr bool reads_storage(int64_t head_dim) {
  return head_dim % (V::kLanes * larger(Steps::kWord, 2)) == 0;
}

// out[q, position] = the sum over the steps of queries a and keys.
//
// Where there are registers for it, two vectors of positions share what is read of the queries, and
// as many sums again wait for their last product. Then their words are transposed into memory.
template <class V, class Steps, int kQueries>
void score_rows(const FewProduct& p) {
  using F = typename V::F;
  constexpr int64_t kLanes = V::kLanes, kBytes = kLanes * 4;
  constexpr int kParts = Steps::kWord / Steps::kStep;
  constexpr int kVectors = V::kTileQueries * V::kTileVectors >= 2 * kFewQueries ? 2 : 1;
  const int64_t bytes = p.head_dim * Steps::Format::kBytes;
  alignas(64) float turned[kLanes][kVectors * kLanes];
  for (int64_t i = 0; i < p.rows.count; i += kVectors * kLanes) {
    F sums[kQueries][kVectors];
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[q][v] = V::broadcast(0.0f);
    const float* a = p.a;
    for (int64_t at = 0; at < bytes; at += kBytes) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const unsigned char* const* const rows = p.rows.at + i + v * kLanes;
        typename V::I words[kLanes];
#pragma GCC unroll 16
        for (int64_t l = 0; l < kLanes; ++l) words[l] = V::bits_of(Float32::load(rows[l] + at));
        V::transpose(words);
#pragma GCC unroll 16
        for (int64_t l = 0; l < kLanes; ++l)
          V::store(turned[l] + v * kLanes, V::float_of(words[l]));
      }
#pragma GCC unroll 1
      for (int64_t l = 0; l < kLanes; ++l) {
        p.rows.ask(kVectors);
        F parts[kVectors][kParts];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          Steps::split(V::bits_of(Float32::load(bytes_of(turned[l] + v * kLanes))), parts[v]);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part, ++a)
#pragma GCC unroll 8
          for (int q = 0; q < kQueries; ++q) {
            const F x = Steps::spread(a + q * p.a_stride);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v)
              sums[q][v] = Steps::dot(parts[v][part], x, sums[q][v]);
          }
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        V::store(p.out + q * p.out_stride + i + v * kLanes, sums[q][v]);
  }
}

// out[q, element] = (or +=, unless `fresh`) the sum over the positions of weights a and values.
template <class V, class Steps, int kQueries>
void weigh_rows(const FewProduct& p) {
  using F = typename V::F;
  constexpr int kStep = Steps::kStep, kVectors = 2, kJoins = kVectors / kStep;
  constexpr int64_t kElements = kVectors * V::kLanes, kPart = V::kLanes * kStep;
  for (int64_t d = 0; d < p.head_dim; d += kElements) {
    const int64_t at = d * Steps::Format::kBytes;
    F sums[kQueries][kVectors];
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        sums[q][v] = p.fresh
                         ? V::broadcast(0.0f)
                         : Float32::load(bytes_of(p.out + q * p.out_stride + d + v * V::kLanes));
    for (int64_t i = 0; i < p.rows.count / kStep; ++i) {
      p.rows.ask(kStep * kElements * Steps::Format::kBytes / 64);
      F parts[kJoins][kStep];
#pragma GCC unroll 2
      for (int join = 0; join < kJoins; ++join) {
        const unsigned char* rows[kStep];
#pragma GCC unroll 2
        for (int j = 0; j < kStep; ++j)
          rows[j] = p.rows.at[i * kStep + j] + at + join * kPart * Steps::Format::kBytes;
        Steps::join(rows, kPart, parts[join]);
      }
#pragma GCC unroll 8
      for (int q = 0; q < kQueries; ++q) {
        const F x = Steps::spread(p.a + q * p.a_stride + i);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          sums[q][v] = Steps::dot(parts[v / kStep][v % kStep], x, sums[q][v]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        V::store(p.out + q * p.out_stride + d + v * V::kLanes, sums[q][v]);
  }
}

// Runs score_rows, or else weigh_rows, for `queries` of them.
template <class V, class Steps, bool kScores, int kQueries = kFewQueries>
void multiply_few(const FewProduct& p, int64_t queries) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) return multiply_few<V, Steps, kScores, kQueries - 1>(p, queries);
  }
  return kScores ? score_rows<V, Steps, kQueries>(p) : weigh_rows<V, Steps, kQueries>(p);
}

}  // namespace
}  // namespace pipespec::cpu
