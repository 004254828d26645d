// Bindings of keys and values, their rotation, and attention over them: addresses, strides and
// numbers in. The caller has checked shapes and dtypes; a row whose numbers do not fit is returned,
// or -1.
#include "../cpu/kv.hpp"

#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "../cpu/attention.hpp"
#include "../cpu/rope.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Address = std::uintptr_t;
using Place =
    std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;  // of cpu::StridedTokens
using Numbers = std::tuple<Address, bool>;                          // of cpu::Integers
using Sizes = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

cpu::StridedTokens tokens(const Place& place) {
  const auto [data, row, head, position] = place;
  return {reinterpret_cast<char*>(data), row, head, position};
}

cpu::Integers integers(const Numbers& numbers) {
  return {reinterpret_cast<const void*>(std::get<0>(numbers)), std::get<1>(numbers)};
}

cpu::KvStorage storage(const Place& keys, const Place& values, const Sizes& sizes) {
  const auto [rows, heads, capacity, token_bytes] = sizes;
  return {tokens(keys), tokens(values), rows, heads, capacity, token_bytes};
}

// Address and strides in elements of row, head and column.
using Columns = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t>;

void* take(const Columns& columns, std::int64_t (&strides)[3]) {
  Address address;
  std::tie(address, strides[0], strides[1], strides[2]) = columns;
  return reinterpret_cast<void*>(address);
}

std::int64_t verify_attention(int dtype, const std::array<std::int64_t, 6>& sizes,
                              const Columns& queries, const Columns& keys, const Columns& values,
                              const Columns& out, std::int64_t window, const Numbers& lengths,
                              const Numbers& counts, float scale, float softcap, int threads) {
  cpu::Attention attention{};
  attention.dtype = cpu::DType(dtype);
  std::tie(attention.rows, attention.heads, attention.kv_heads, attention.columns,
           attention.head_dim, attention.capacity) = std::tuple_cat(sizes);
  attention.queries = take(queries, attention.query_strides);
  attention.keys = take(keys, attention.key_strides);
  attention.values = take(values, attention.value_strides);
  attention.out = take(out, attention.out_strides);
  attention.window = window;
  attention.scale = scale;
  attention.softcap = softcap;
  return cpu::attend(attention, integers(lengths), integers(counts), threads);
}

cpu::Heads heads(const Columns& columns) {
  cpu::Heads result;
  result.data = take(columns, result.strides);
  return result;
}

// Address, and elements from one position to the next.
using TableAt = std::tuple<Address, std::int64_t>;

cpu::Table table(const TableAt& at) {
  return {reinterpret_cast<const void*>(std::get<0>(at)), std::get<1>(at)};
}

std::int64_t rope_append(int dtype, int tables_dtype, const std::array<std::int64_t, 8>& sizes,
                         const std::array<Columns, 6>& tensors, const TableAt& cos,
                         const TableAt& sin, const Numbers& lengths, const Numbers& counts,
                         const Numbers& positions, std::int64_t positions_row,
                         std::int64_t positions_column) {
  cpu::RopeTask task{};
  task.dtype = cpu::DType(dtype);
  task.tables_dtype = cpu::DType(tables_dtype);
  std::tie(task.rows, task.heads, task.kv_heads, task.columns, task.head_dim, task.rotary_dim,
           task.capacity, task.table_rows) = std::tuple_cat(sizes);
  cpu::Heads* const fields[] = {&task.queries,     &task.keys,          &task.values,
                                &task.key_storage, &task.value_storage, &task.out};
  for (std::size_t i = 0; i < tensors.size(); ++i) *fields[i] = heads(tensors[i]);
  task.cos = table(cos);
  task.sin = table(sin);
  task.lengths = integers(lengths);
  task.counts = integers(counts);
  task.positions = integers(positions);
  task.positions_row = positions_row;
  task.positions_column = positions_column;
  return cpu::rope_append(task);
}

}  // namespace

void bind_kv(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def(
      "kv_append",
      [](const Place& keys, const Place& values, const Sizes& sizes, const Place& new_keys,
         const Place& new_values, std::int64_t width, const Numbers& lengths,
         const Numbers& counts) {
        return cpu::kv_append(storage(keys, values, sizes), tokens(new_keys), tokens(new_values),
                              width, integers(lengths), integers(counts));
      },
      release());
  m.def("verify_attention", &verify_attention, release());
  m.def("rope_append", &rope_append, release());
}

}  // namespace pipespec
