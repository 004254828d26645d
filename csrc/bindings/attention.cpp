// Bindings of attention over storage: addresses, strides and numbers in. The caller has checked
// shapes and dtypes; a row whose numbers do not fit is returned, or -1.
#include "../cpu/attention.hpp"

#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Address = std::uintptr_t;
using Numbers = std::tuple<Address, bool>;  // of cpu::Integers

cpu::Integers integers(const Numbers& numbers) {
  return {reinterpret_cast<const void*>(std::get<0>(numbers)), std::get<1>(numbers)};
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

}  // namespace

void bind_attention(py::module_& m) {
  m.def("verify_attention", &verify_attention, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pipespec
