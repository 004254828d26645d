// Bindings of the simulator: plain arguments in, a dict out. python/pipespec/planning/simulator.py
// gives them names and defaults.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../runtime/simulator.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

py::dict as_dict(const sim::Result& result) {
  py::list stages;
  for (const sim::StageResult& s : result.stages) {
    py::dict stage;
    stage["steps"] = s.steps;
    stage["drafted"] = s.drafted;
    stage["accepted"] = s.accepted;
    stage["adopted"] = s.adopted;
    stage["truncated"] = s.truncated;
    stage["rollbacks"] = s.rollbacks;
    stage["busy_s"] = s.busy_s;
    stage["histogram"] = s.histogram;
    stage["squared_error"] = s.squared_error;
    stage["outcomes"] = s.outcomes;
    stages.append(stage);
  }
  py::dict out;
  out["seconds"] = result.seconds;
  out["tokens"] = result.tokens;
  out["stages"] = stages;
  return out;
}

template <auto Function>
py::dict simulate(const sim::Setting& setting) {
  sim::Result result;
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

void bind_simulate(py::module_& m) {
  py::class_<sim::StageModel>(m, "SimStage")
      .def(py::init<>())
      .def_readwrite("step_s", &sim::StageModel::step_s)
      .def_readwrite("start_s", &sim::StageModel::start_s)
      .def_readwrite("device", &sim::StageModel::device)
      .def_readwrite("sensitivity", &sim::StageModel::sensitivity)
      .def_readwrite("cold_s", &sim::StageModel::cold_s)
      .def_readwrite("ngram", &sim::StageModel::ngram)
      .def_readwrite("lookahead", &sim::StageModel::lookahead)
      .def_readwrite("max_draft_tokens", &sim::StageModel::max_draft_tokens)
      .def_readwrite("min_draft_tokens", &sim::StageModel::min_draft_tokens);
  py::class_<sim::Setting>(m, "SimSetting")
      .def(py::init<>())
      .def_readwrite("stages", &sim::Setting::stages)
      .def("set_acceptance",
           [](sim::Setting& s, std::vector<double> a) { s.answers.acceptance = std::move(a); })
      .def("set_table", [](sim::Setting& s, const py::bytes& t) { s.answers.table = bytes(t); })
      .def("set_confidence",
           [](sim::Setting& s, const py::bytes& t) { s.answers.confidence = bytes(t); })
      .def_readwrite("confidence", &sim::Setting::confidence)
      .def_readwrite("tokens", &sim::Setting::tokens)
      .def_readwrite("rows", &sim::Setting::rows)
      .def_readwrite("width", &sim::Setting::width)
      .def_readwrite("seed", &sim::Setting::seed)
      .def_readwrite("contention", &sim::Setting::contention)
      .def_readwrite("cores", &sim::Setting::cores)
      .def_readwrite("patience", &sim::Setting::patience)
      .def_readwrite("wake_s", &sim::Setting::wake_s)
      .def_readwrite("late_s", &sim::Setting::late_s)
      .def_readwrite("decode_meanwhile", &sim::Setting::decode_meanwhile)
      .def_readwrite("preempt", &sim::Setting::preempt)
      .def_readwrite("handshake_s", &sim::Setting::handshake_s)
      .def_readwrite("lookahead", &sim::Setting::lookahead);
  m.def("simulate_asynchronous", &simulate<&sim::asynchronous>, py::arg("setting"));
  m.def("simulate_lockstep", &simulate<&sim::lockstep>, py::arg("setting"));
  m.def("simulate_reference_async", &simulate<&sim::reference_async>, py::arg("setting"));
  m.def("simulate_reference_sync", &simulate<&sim::reference_sync>, py::arg("setting"));
  m.def(
      "simulate_spd",
      [](std::vector<double> stage_s, double draft_s, double cycle_s, bool shared,
         double acceptance, const py::bytes& table, std::uint32_t tokens, std::uint32_t rows,
         std::uint64_t seed) {
        const sim::SpdSetting setting{std::move(stage_s), draft_s, cycle_s, shared, acceptance,
                                      bytes(table),       tokens,  rows,    seed};
        sim::SpdResult result;
        {
          py::gil_scoped_release unlocked;
          result = sim::spd(setting);
        }
        py::dict out;
        out["seconds"] = result.seconds;
        out["tokens"] = result.tokens;
        out["cycles"] = result.cycles;
        out["flushes"] = result.flushes;
        return out;
      },
      py::arg("stage_s"), py::arg("draft_s"), py::arg("cycle_s"), py::arg("shared"),
      py::arg("acceptance"), py::arg("table"), py::arg("tokens"), py::arg("rows"), py::arg("seed"));
}

}  // namespace pipespec
