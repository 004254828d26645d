// Attention of the new columns of each row over storage that holds their keys and values, on the
// host. See verify_attention in pipespec_kernels/kv.py for what it computes.
//
// Arithmetic is float32. Each number is computed by one sequence of operations, whatever the number
// of rows, columns and threads. Other instructions (set_simd in select.hpp) may round differently.
#pragma once

#include <cstdint>

#include "select.hpp"

namespace pipespec::cpu {

// int32 or int64 numbers.
struct Integers {
  const void* data;
  bool is_wide;

  int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Strides in elements of row, head and column or position; the elements of a head are contiguous.
struct Attention {
  DType dtype;  // kFloat32 or kBFloat16, of all four
  int64_t rows, heads, kv_heads, columns, head_dim, capacity;
  const void* queries;
  int64_t query_strides[3];
  const void* keys;
  int64_t key_strides[3];
  const void* values;
  int64_t value_strides[3];
  void* out;
  int64_t out_strides[3];
  int64_t window;  // the last positions that a column sees, its own included; 0: all
  float scale;
  float softcap;  // scores are softcap * tanh(scaled score / softcap); 0: not capped
};

// `lengths` before the new columns, of which row r has `counts[r]` (all, if counts.data is null).
// Columns after them become zeros. Returns the first row whose numbers lie outside of the storage,
// or -1; then nothing has been written. May use `threads` threads of the pool.
int64_t attend(const Attention& attention, Integers lengths, Integers counts, int threads);

}  // namespace pipespec::cpu
