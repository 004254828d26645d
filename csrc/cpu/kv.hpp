// New keys and values into storage of fixed size, on the host. See kv_append in
// pipespec_kernels/kv.py for what it does.
#pragma once

#include <cstdint>

namespace pipespec::cpu {

// The tokens of all rows and heads. Strides in bytes; a token of a head is contiguous.
struct StridedTokens {
  char* data;
  int64_t row, head, position;
};

// Storage of keys and values, [rows, heads, capacity], of `token_bytes` per token and head.
struct KvStorage {
  StridedTokens keys, values;
  int64_t rows, heads, capacity, token_bytes;
};

// int32 or int64 numbers.
struct Integers {
  const void* data;
  bool is_wide;

  int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// counts.data null: all `width` columns. First checks all numbers, and returns the first row whose
// numbers lie outside of the storage, or -1; then nothing has been written.
int64_t kv_append(const KvStorage& storage, StridedTokens keys, StridedTokens values, int64_t width,
                  Integers lengths, Integers counts);

}  // namespace pipespec::cpu
