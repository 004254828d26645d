// Bindings of matrices in the block formats of GGUF. The caller has checked shapes and dtypes.
#include "../cpu/formats/formats.hpp"

#include <memory>
#include <string>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {

void bind_formats(py::module_& m) {
  using cpu::PackedMatrix;
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::list names;
  for (int i = 0; i < cpu::kFormats; ++i) names.append(cpu::traits(cpu::Format(i)).name);
  m.attr("WEIGHT_FORMATS") = py::tuple(names);
  m.def("packed_simd", [] { return std::string(cpu::packed_kernels().name); });
  py::class_<PackedMatrix>(m, "PackedMatrix")
      .def(py::init([](int format, std::uintptr_t blocks, std::int64_t outputs, std::int64_t inputs,
                       int threads) {
        py::gil_scoped_release without_gil;
        return std::make_unique<PackedMatrix>(
            cpu::Format(format), reinterpret_cast<const void*>(blocks), outputs, inputs, threads);
      }))
      .def_property_readonly("bytes", &PackedMatrix::bytes)
      .def(
          "product",
          [](const PackedMatrix& matrix, std::uintptr_t x, std::int64_t columns, std::uintptr_t out,
             int threads) {
            matrix.product(reinterpret_cast<const float*>(x), columns,
                           reinterpret_cast<float*>(out), threads);
          },
          WithoutGil())
      .def(
          "row",
          [](const PackedMatrix& matrix, std::int64_t output, std::uintptr_t to) {
            matrix.row(output, reinterpret_cast<float*>(to));
          },
          WithoutGil());
}

}  // namespace pipespec
