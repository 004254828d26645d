// Bindings of the scheduler and of the launcher for the host. pipespec_kernels/scheduler.py adds
// names, defaults and the handling of Ctrl-C.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../runtime/host_launcher.hpp"
#include "../runtime/scheduler.hpp"
#include "bindings.hpp"
#include "trace.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

using Rectangle = HostLauncher::Rectangle;

// Views, not copies. They are valid while the model runs.
py::array rows_of(py::object self, const std::int32_t* Rectangle::* field) {
  const auto& r = self.cast<const Rectangle&>();
  return py::array_t<std::int32_t>({py::ssize_t{r.rows}}, r.*field, self);
}
py::array rectangle_of(py::object self, const std::int32_t* data) {
  const auto& r = self.cast<const Rectangle&>();
  return py::array_t<std::int32_t>({py::ssize_t{r.rows}, py::ssize_t{r.width}}, data, self);
}
template <auto Field>
py::array rows_property(py::object self) {
  return rows_of(std::move(self), Field);
}

// Its destructor waits for steps that may need the interpreter.
struct Unlocked {
  void operator()(Scheduler* scheduler) const {
    const py::gil_scoped_release unlocked;
    delete scheduler;
  }
};

py::array trace(const Scheduler& scheduler, std::uint32_t stage) {
  return as_array(scheduler.trace(stage));
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::register_exception<TargetFailed>(m, "TargetFailed", PyExc_RuntimeError);
  py::class_<Options>(m, "Options")
      .def(py::init<std::uint32_t, std::uint32_t>(), py::arg("ahead"), py::arg("trace"));

  py::class_<Launcher, std::shared_ptr<Launcher>>(m, "Launcher");
  py::class_<Rectangle>(m, "Rectangle")
      .def_property_readonly(
          "tokens",
          [](py::object self) { return rectangle_of(self, self.cast<const Rectangle&>().tokens); })
      .def_property_readonly("kv", &rows_property<&Rectangle::kv>)
      .def_property_readonly("query_lens", &rows_property<&Rectangle::query_lens>)
      .def_property_readonly("num_draft_tokens", &rows_property<&Rectangle::num_draft_tokens>)
      .def_property_readonly("n_select", &rows_property<&Rectangle::n_select>)
      .def_property_readonly("selected", [](py::object self) {
        return rectangle_of(self, self.cast<const Rectangle&>().selected);
      });
  py::class_<HostLauncher, Launcher, std::shared_ptr<HostLauncher>>(m, "HostLauncher")
      .def(py::init([](py::array_t<std::uint8_t> memory, std::vector<HostLauncher::Model> models,
                       std::vector<HostLauncher::Widths> widths, bool shadowed) {
             return std::make_shared<HostLauncher>(memory.mutable_data(), std::move(models),
                                                   std::move(widths), shadowed);
           }),
           py::arg("memory"), py::arg("models"), py::arg("widths"), py::arg("shadowed"),
           py::keep_alive<1, 2>());

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Scheduler, std::unique_ptr<Scheduler, Unlocked>>(m, "Scheduler")
      .def(py::init([](std::shared_ptr<Launcher> launcher, const Options& options,
                       const std::vector<std::uint32_t>& lookahead) {
             return std::unique_ptr<Scheduler, Unlocked>(
                 new Scheduler(std::move(launcher), options, lookahead));
           }),
           py::arg("launcher"), py::arg("options"), py::arg("lookahead"), py::keep_alive<1, 2>())
      .def_property_readonly("started", &Scheduler::started)
      .def("start", &Scheduler::start, unlocked)
      .def(
          "wait",
          [](Scheduler& s, std::uint64_t steps, std::int64_t timeout_ns) {
            Scheduler::Progress progress;
            {
              const py::gil_scoped_release unlocked_here;
              progress = s.wait(steps, timeout_ns);
            }
            return py::make_tuple(progress.steps, progress.running);
          },
          py::arg("steps"), py::arg("timeout_ns"))
      .def("request_stop", &Scheduler::request_stop)
      .def("stop", &Scheduler::stop, unlocked)
      .def("finish", &Scheduler::finish, unlocked)
      .def("settle", &Scheduler::settle, unlocked)
      .def("steer", &Scheduler::steer, py::arg("lookahead"))
      .def("end_row", &Scheduler::end_row, py::arg("row"))
      .def("failures",
           [](const Scheduler& s) {
             py::list out;
             for (const StageFailure& failure : s.failures())
               out.append(py::make_tuple(failure.stage, failure.cause));
             return out;
           })
      .def("trace", &trace, py::arg("stage"));
}

}  // namespace pipespec
