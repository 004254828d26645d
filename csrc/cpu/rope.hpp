// Rotation of new queries and keys to their positions (RoPE), and keys and values into storage, on
// the host. See rope_append in pipespec_kernels/layers.py for what it computes, roundings included.
//
// A result depends on its own inputs alone, and not on the instructions in use.
#pragma once

#include <cstdint>

#include "kv.hpp"
#include "select.hpp"

namespace pipespec::cpu {

// Elements of [rows, heads, columns or positions, head_dim]: strides in elements; a head is
// contiguous.
struct Heads {
  void* data;
  int64_t strides[3];
};

// Rows of [positions, rotary_dim], contiguous.
struct Table {
  const void* data;
  int64_t stride;
};

struct RopeTask {
  DType dtype;         // kFloat32 or kBFloat16
  DType tables_dtype;  // kFloat32, or that of the numbers
  int64_t rows, heads, kv_heads, columns, head_dim, rotary_dim, capacity, table_rows;
  Heads queries, keys, values, key_storage, value_storage, out;
  Table cos, sin;
  Integers lengths, counts;  // counts.data null: all columns
  Integers positions;        // [rows, columns]; data null: length + column
  int64_t positions_row, positions_column;
};

// Returns the first row whose numbers lie outside of the storage or of the tables, or -1; then
// nothing has been written.
int64_t rope_append(const RopeTask& task);

}  // namespace pipespec::cpu
