// Bindings of prompt lookup: the index of n-grams, and the stage over it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "../runtime/ngram_stage.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Tokens = py::array_t<std::int32_t, py::array::c_style>;

std::size_t count(const Tokens& tokens) {
  if (tokens.ndim() != 1) throw std::invalid_argument("tokens must have one dimension");
  return static_cast<std::size_t>(tokens.size());
}

}  // namespace

void bind_ngram(py::module_& m) {
  py::class_<NgramIndex>(m, "NgramIndex")
      .def(py::init<std::uint32_t, std::uint32_t>(), py::arg("min_match"), py::arg("max_match"))
      .def("__len__", &NgramIndex::size)
      .def(
          "write",
          [](NgramIndex& index, std::size_t position, const Tokens& tokens) {
            if (position > index.size())
              throw py::index_error("position " + std::to_string(position) + " of a text of " +
                                    std::to_string(index.size()) + " tokens");
            const std::size_t n = count(tokens);
            const std::int32_t* data = tokens.data();
            const py::gil_scoped_release released;
            index.write(position, data, n);
          },
          py::arg("position"), py::arg("tokens").noconvert())
      .def("truncate", &NgramIndex::truncate, py::arg("length"))
      .def(
          "match",
          [](const NgramIndex& index, const NgramCorpus* corpus) {
            const NgramIndex::Match match = index.match(corpus);
            return std::make_pair(match.token, match.length);
          },
          py::arg("corpus") = nullptr);
  py::class_<NgramCorpus, std::shared_ptr<NgramCorpus>>(m, "NgramCorpus")
      .def(py::init([](const Tokens& tokens, std::uint32_t max_match) {
             const std::size_t n = count(tokens);
             const std::int32_t* data = tokens.data();
             const py::gil_scoped_release released;
             return std::make_shared<NgramCorpus>(data, n, max_match);
           }),
           py::arg("tokens").noconvert(), py::arg("max_match"));
  m.attr("MAX_MATCH") = NgramIndex::kMaxMatch;

  // Python keeps the block's memory as an attribute.
  py::class_<NgramStage>(m, "NgramStage", py::dynamic_attr())
      .def(py::init<const Block&, std::uint32_t, std::uint32_t, const NgramIndex&,
                    std::shared_ptr<NgramCorpus>>(),
           py::arg("block"), py::arg("stage"), py::arg("width"), py::arg("empty"),
           py::arg("corpus"))
      .def(
          "prefill",
          [](NgramStage& stage, std::uint32_t row, const Tokens& tokens) {
            const std::size_t n = count(tokens);
            const std::int32_t* data = tokens.data();
            const py::gil_scoped_release released;
            stage.prefill(row, data, n);
          },
          py::arg("row"), py::arg("tokens").noconvert())
      .def(
          "text",
          [](const NgramStage& stage, std::uint32_t row, std::uint32_t begin) {
            const std::vector<std::int32_t> text = stage.text(row, begin);
            return py::array_t<std::int32_t>(static_cast<py::ssize_t>(text.size()), text.data());
          },
          py::arg("row"), py::arg("begin"))
      .def("fill", &NgramStage::fill, py::arg("lookahead"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "foresee",
          [](NgramStage& stage, std::uint32_t row, std::uint32_t count) {
            const NgramStage::Outlook outlook = stage.foresee(row, count);
            return std::make_pair(outlook.tokens, outlook.match);
          },
          py::arg("row"), py::arg("count"))
      .def("relay", &NgramStage::relay, py::arg("count"))
      .def("trace", &NgramStage::trace, py::arg("buffer"), py::keep_alive<1, 2>());
}

}  // namespace pipespec
