// Bindings of the trace buffer over memory that processes share; pipespec_kernels/trace.py owns
// that memory.
#include "trace.hpp"

#include <pybind11/pybind11.h>

#include <stdexcept>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {

py::array as_array(const std::vector<TraceEntry>& entries) {
  // Not when the module is imported: that must work without numpy.
  static const bool registered = [] {
    PYBIND11_NUMPY_DTYPE(TraceEntry, step, launched_ns, start_ns, end_ns, width, fed, draft_tokens,
                         accepted, rolled_back, in_flight, rollbacks, prefill);
    return true;
  }();
  (void)registered;
  return py::array_t<TraceEntry>(static_cast<py::ssize_t>(entries.size()), entries.data());
}

void bind_trace(py::module_& m) {
  py::class_<TraceBuffer>(m, "TraceBuffer")
      .def(py::init([](py::array_t<std::uint8_t> memory, std::uint32_t capacity) {
             if (static_cast<std::size_t>(memory.nbytes()) < TraceBuffer::bytes(capacity))
               throw std::invalid_argument("a trace of so many entries needs more memory");
             return TraceBuffer(memory.mutable_data(), capacity);
           }),
           py::arg("memory"), py::arg("capacity"), py::keep_alive<1, 2>())
      .def_static("bytes", &TraceBuffer::bytes, py::arg("capacity"))
      .def_property_readonly("written", &TraceBuffer::written)
      .def("read", [](const TraceBuffer& buffer) { return as_array(buffer.read()); })
      .def("clear", &TraceBuffer::clear)
      .def(
          "prefill",
          [](TraceBuffer& buffer, std::int64_t launched_ns, std::int64_t start_ns,
             std::int64_t end_ns, std::uint32_t width, std::uint32_t tokens) {
            buffer.write(
                {buffer.written(), launched_ns, start_ns, end_ns, width, 0, 0, 0, 0, 0, 0, tokens});
          },
          py::arg("launched_ns"), py::arg("start_ns"), py::arg("end_ns"), py::arg("width"),
          py::arg("tokens"));
}

}  // namespace pipespec
