#include "kv.hpp"

#include <cstring>

namespace pipespec::cpu {
namespace {

char* place(const StridedTokens& tokens, int64_t row, int64_t head, int64_t position) {
  return tokens.data + row * tokens.row + head * tokens.head + position * tokens.position;
}

// `count` tokens, `to_step` and `from_step` bytes apart, which do not overlap.
void copy(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t bytes,
          int64_t count) {
  if (count == 0) return;  // the addresses may be null
  if (to_step == bytes && from_step == bytes) {
    std::memcpy(to, from, size_t(bytes * count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, size_t(bytes));
  }
}

bool fits(int64_t first, int64_t count, int64_t width, int64_t capacity) {
  return count >= 0 && count <= width && first >= 0 && first <= capacity - count;
}

}  // namespace

int64_t kv_append(const KvStorage& storage, StridedTokens keys, StridedTokens values, int64_t width,
                  Integers lengths, Integers counts) {
  const auto count_of = [&](int64_t row) { return counts.data == nullptr ? width : counts[row]; };
  for (int64_t row = 0; row < storage.rows; ++row) {
    if (!fits(lengths[row], count_of(row), width, storage.capacity)) return row;
  }
  for (int64_t row = 0; row < storage.rows; ++row) {
    const auto append = [&](const StridedTokens& to, const StridedTokens& from, int64_t head) {
      copy(place(to, row, head, lengths[row]), to.position, place(from, row, head, 0),
           from.position, storage.token_bytes, count_of(row));
    };
    for (int64_t head = 0; head < storage.heads; ++head) {
      append(storage.keys, keys, head);
      append(storage.values, values, head);
    }
  }
  return -1;
}

}  // namespace pipespec::cpu
