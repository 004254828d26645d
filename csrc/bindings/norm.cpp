// Bindings of the residual add and RMS norm and of the gated activation: addresses and numbers in,
// nothing out; the caller has allocated the results and checked everything.
#include "../cpu/norm.hpp"

#include "../cpu/activation.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Address = std::uintptr_t;

void add_rms_norm(int dtype, std::int64_t rows, std::int64_t hidden, Address x,
                  std::int64_t x_stride, Address residual, std::int64_t residual_stride,
                  Address weight, Address bias, float eps, bool one_plus_weight, Address out,
                  std::int64_t out_stride, Address total, std::int64_t total_stride) {
  const auto at = [](Address address) { return reinterpret_cast<void*>(address); };
  cpu::add_rms_norm({cpu::DType(dtype), rows, hidden, at(x), x_stride, at(residual),
                     residual_stride, at(weight), at(bias), eps, one_plus_weight, at(out),
                     out_stride, at(total), total_stride});
}

void silu_mul(int dtype, int activation, std::int64_t rows, std::int64_t size, Address gate_up,
              std::int64_t stride, Address out, std::int64_t out_stride) {
  cpu::gated_activation({cpu::DType(dtype), cpu::Activation(activation), rows, size,
                         reinterpret_cast<const void*>(gate_up), stride,
                         reinterpret_cast<void*>(out), out_stride});
}

}  // namespace

void bind_norm(py::module_& m) {
  m.def("add_rms_norm", &add_rms_norm, py::call_guard<py::gil_scoped_release>());
  m.def("silu_mul", &silu_mul, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pipespec
