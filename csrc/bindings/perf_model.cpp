// Bindings of the perf model: plain arguments in, a dict out.
// bench/perf_model.py gives them names and defaults.
#include "../runtime/perf_model.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

py::dict as_dict(const perf::Result& result) {
  py::list stages;
  for (const perf::StageResult& s : result.stages) {
    py::dict stage;
    stage["steps"] = s.steps;
    stage["drafted"] = s.drafted;
    stage["accepted"] = s.accepted;
    stage["rollbacks"] = s.rollbacks;
    stage["histogram"] = s.histogram;
    stages.append(stage);
  }
  py::dict out;
  out["seconds"] = result.seconds;
  out["tokens"] = result.tokens;
  out["stages"] = stages;
  return out;
}

template <auto Function>
py::dict simulate(const perf::Setting& setting) {
  perf::Result result;
  {
    py::gil_scoped_release unlocked;
    result = Function(setting);
  }
  return as_dict(result);
}

// A table of answers arrives as bytes: a list of Python integers would take longer than the run.
std::vector<std::uint8_t> bytes(const py::bytes& data) {
  const std::string_view view = data;
  return {view.begin(), view.end()};
}

}  // namespace

void bind_perf_model(py::module_& m) {
  py::class_<perf::StageModel>(m, "SimStage")
      .def(py::init<>())
      .def_readwrite("step_s", &perf::StageModel::step_s)
      .def_readwrite("start_s", &perf::StageModel::start_s)
      .def_readwrite("lookahead", &perf::StageModel::lookahead)
      .def_readwrite("max_draft_tokens", &perf::StageModel::max_draft_tokens)
      .def_readwrite("min_draft_tokens", &perf::StageModel::min_draft_tokens);
  py::class_<perf::Setting>(m, "SimSetting")
      .def(py::init<>())
      .def_readwrite("stages", &perf::Setting::stages)
      .def("set_acceptance",
           [](perf::Setting& s, std::vector<double> a) { s.answers.acceptance = std::move(a); })
      .def("set_table", [](perf::Setting& s, const py::bytes& t) { s.answers.table = bytes(t); })
      .def_readwrite("tokens", &perf::Setting::tokens)
      .def_readwrite("width", &perf::Setting::width)
      .def_readwrite("seed", &perf::Setting::seed)
      .def_readwrite("patience", &perf::Setting::patience)
      .def_readwrite("decode_meanwhile", &perf::Setting::decode_meanwhile)
      .def_readwrite("preempt", &perf::Setting::preempt)
      .def_readwrite("handshake_s", &perf::Setting::handshake_s)
      .def_readwrite("lookahead", &perf::Setting::lookahead);
  m.def("simulate_asynchronous", &simulate<&perf::asynchronous>, py::arg("setting"));
  m.def("simulate_reference_async", &simulate<&perf::reference_async>, py::arg("setting"));
  m.def("simulate_reference_sync", &simulate<&perf::reference_sync>, py::arg("setting"));
}

}  // namespace pipespec
