// Bindings of the launcher of captured graphs. Its base class is in _native, like the scheduler
// that uses it.
#include "cuda/launcher.hpp"

#include <pybind11/stl.h>

#include "bindings/cuda/bindings.hpp"

namespace py = pybind11;

namespace pipespec::cuda {

void bind_launcher(py::module_& m) {
  py::module_::import("pipespec_kernels._native");
  m.attr("STEP_LOG_BYTES") = sizeof(StepLog);
  m.attr("STEP_SCRATCH_BYTES") = sizeof(StepScratch);
  m.attr("STEPS_IN_FLIGHT") = StepLog::kRecords;
  py::class_<StageGraphs>(m, "StageGraphs")
      .def(py::init<>())
      .def_readwrite("device", &StageGraphs::device)
      .def_readwrite("priority", &StageGraphs::priority)
      .def_readwrite("widths", &StageGraphs::widths)
      .def_readwrite("graphs", &StageGraphs::graphs)
      .def_readwrite("block", &StageGraphs::block)
      .def_readwrite("policies", &StageGraphs::policies)
      .def_readwrite("scratch", &StageGraphs::scratch)
      .def_readwrite("log", &StageGraphs::log);
  py::class_<CudaLauncher, Launcher, std::shared_ptr<CudaLauncher>>(m, "CudaLauncher")
      .def(py::init<std::uintptr_t, std::vector<StageGraphs>>(), py::arg("shadow"),
           py::arg("stages"))
      .def("counters", [](const CudaLauncher& launcher) {
        py::dict out;
        out["launches"] = launcher.launches();
        out["host_syncs"] = launcher.host_syncs();
        return out;
      });
}

}  // namespace pipespec::cuda
