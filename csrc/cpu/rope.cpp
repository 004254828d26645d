#include "rope.hpp"

#include <cstring>

#include "number.hpp"

namespace pipespec::cpu {
namespace {

float widened(float x) { return x; }
float widened(uint16_t x) { return float_of_bfloat16(x); }
template <typename Item>
Item narrowed(float x) {
  if constexpr (sizeof(Item) == 4) {
    return x;
  } else {
    return bfloat16_of(x);
  }
}
// As torch rounds between operations whose result has the dtype of `Item`.
template <typename Item>
float rounded(float x) {
  return widened(narrowed<Item>(x));
}

// Products and sums have the wider one of both dtypes.
template <typename Item, typename Angle>
void rotate(const Item* __restrict__ x, const Angle* __restrict__ cos,
            const Angle* __restrict__ sin, int64_t rotary, int64_t dim, Item* __restrict__ out) {
  const int64_t half = rotary / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = widened(x[i]), b = widened(x[i + half]);
    const float ac = rounded<Angle>(a * widened(cos[i]));
    const float bs = rounded<Angle>(-b * widened(sin[i]));
    const float bc = rounded<Angle>(b * widened(cos[i + half]));
    const float as = rounded<Angle>(a * widened(sin[i + half]));
    out[i] = narrowed<Item>(ac + bs);
    out[i + half] = narrowed<Item>(bc + as);
  }
  std::memcpy(out + rotary, x + rotary, size_t(dim - rotary) * sizeof(Item));
}

template <typename Item>
Item* at(const Heads& heads, int64_t row, int64_t head, int64_t column) {
  return static_cast<Item*>(heads.data) + row * heads.strides[0] + head * heads.strides[1] +
         column * heads.strides[2];
}

int64_t count_of(const RopeTask& task, int64_t row) {
  return task.counts.data == nullptr ? task.columns : task.counts[row];
}

int64_t position_of(const RopeTask& task, int64_t row, int64_t column) {
  return task.positions.data == nullptr
             ? task.lengths[row] + column
             : task.positions[row * task.positions_row + column * task.positions_column];
}

bool fits(const RopeTask& task, int64_t row) {
  const int64_t length = task.lengths[row], count = count_of(task, row);
  if (count < 0 || count > task.columns || length < 0 || length > task.capacity - count)
    return false;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t position = position_of(task, row, j);
    if (position < 0 || position >= task.table_rows) return false;
  }
  return true;
}

template <typename Item, typename Angle>
void append(const RopeTask& task) {
  const size_t bytes = size_t(task.head_dim) * sizeof(Item);
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t length = task.lengths[row], count = count_of(task, row);
    for (int64_t j = 0; j < task.columns; ++j) {
      if (j >= count) {
        for (int64_t head = 0; head < task.heads; ++head)
          std::memset(at<Item>(task.out, row, head, j), 0, bytes);
        continue;
      }
      const int64_t position = position_of(task, row, j);
      const Angle* const cos =
          static_cast<const Angle*>(task.cos.data) + position * task.cos.stride;
      const Angle* const sin =
          static_cast<const Angle*>(task.sin.data) + position * task.sin.stride;
      for (int64_t head = 0; head < task.heads; ++head)
        rotate(at<Item>(task.queries, row, head, j), cos, sin, task.rotary_dim, task.head_dim,
               at<Item>(task.out, row, head, j));
      for (int64_t head = 0; head < task.kv_heads; ++head) {
        rotate(at<Item>(task.keys, row, head, j), cos, sin, task.rotary_dim, task.head_dim,
               at<Item>(task.key_storage, row, head, length + j));
        std::memcpy(at<Item>(task.value_storage, row, head, length + j),
                    at<Item>(task.values, row, head, j), bytes);
      }
    }
  }
}

}  // namespace

int64_t rope_append(const RopeTask& task) {
  for (int64_t row = 0; row < task.rows; ++row) {
    if (!fits(task, row)) return row;
  }
  if (task.dtype == DType::kFloat32) {
    append<float, float>(task);
  } else if (task.tables_dtype == DType::kFloat32) {
    append<uint16_t, float>(task);
  } else {
    append<uint16_t, uint16_t>(task);
  }
  return -1;
}

}  // namespace pipespec::cpu
