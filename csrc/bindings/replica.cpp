// Bindings of the messages between ranks.
#include "../runtime/replica.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

const std::vector<std::uint32_t>& checked(const Block& block,
                                          const std::vector<std::uint32_t>& stages) {
  for (const std::uint32_t stage : stages)
    if (stage >= block.stages()) throw std::invalid_argument("the block has no such stage");
  return stages;
}

}  // namespace

void bind_replica(py::module_& m) {
  // Python keeps the block's memory as an attribute.
  py::class_<Outbox>(m, "Outbox", py::dynamic_attr())
      .def(py::init([](const Block& block, const std::vector<std::uint32_t>& stages, bool tokens,
                       bool counters, bool controls) {
             return Outbox(block, checked(block, stages), tokens, counters, controls);
           }),
           py::arg("block"), py::arg("stages"), py::arg("tokens"), py::arg("counters"),
           py::arg("controls"))
      .def(
          "fill",
          [](Outbox& box, std::uintptr_t words, std::uint32_t room) {
            return box.fill(reinterpret_cast<std::int32_t*>(words), room);
          },
          py::arg("words"), py::arg("room"));
  py::class_<Inbox>(m, "Inbox", py::dynamic_attr())
      .def(py::init([](const Block& block, const std::vector<std::uint32_t>& stages,
                       bool controls) { return Inbox(block, checked(block, stages), controls); }),
           py::arg("block"), py::arg("stages"), py::arg("controls"))
      .def(
          "apply",
          [](Inbox& box, std::uintptr_t words, std::uint32_t count) {
            return box.apply(reinterpret_cast<const std::int32_t*>(words), count);
          },
          py::arg("words"), py::arg("count"));
}

}  // namespace pipespec
