// Bindings of the state block and a stage's port onto it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../runtime/generation.hpp"
#include "../runtime/stage_port.hpp"
#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// A view, not a copy: Python reads what plan() wrote.
py::array_t<std::int32_t> view(std::vector<std::int32_t>& data, std::vector<py::ssize_t> shape,
                               py::handle owner) {
  return py::array_t<std::int32_t>(std::move(shape), data.data(), owner);
}

void check_stage(const Block& block, std::uint32_t stage) {
  if (stage >= block.stages())
    throw py::index_error("stage " + std::to_string(stage) + " of a block of " +
                          std::to_string(block.stages()));
}

void check_row(const Block& block, std::uint32_t row) {
  if (row >= block.rows())
    throw py::index_error("row " + std::to_string(row) + " of a block of " +
                          std::to_string(block.rows()));
}

// A method of a stage and a row, with both checked.
template <typename Method>
auto checked(Method method) {
  return [method](const Block& block, std::uint32_t stage, std::uint32_t row) {
    check_stage(block, stage);
    check_row(block, row);
    return method(block, stage, row);
  };
}

py::dict counters(const Block& block, std::uint32_t stage, std::uint32_t row) {
  const Counters& c = block.priv(stage, row).counters;
  py::dict out;
  out["steps"] = load_relaxed(&c.steps);
  out["fed"] = load_relaxed(&c.fed);
  out["drafted"] = load_relaxed(&c.drafted);
  out["accepted"] = load_relaxed(&c.accepted);
  out["produced"] = load_relaxed(&c.produced);
  out["adopted"] = load_relaxed(&c.adopted);
  out["truncated"] = load_relaxed(&c.truncated);
  out["rollbacks"] = load_relaxed(&c.rollbacks);
  py::list histogram;
  for (const std::uint64_t& bin : c.histogram) histogram.append(load_relaxed(&bin));
  out["histogram"] = histogram;
  return out;
}

}  // namespace

void bind_state(py::module_& m) {
  m.attr("MAX_EOS") = kMaxEos;
  m.attr("MAX_STAGES") = kMaxStages;
  m.attr("LINE") = kLine;
  m.attr("PARKED_PART") = kParkedPart;
  m.attr("FIRST_STAGES_PART") = kFirstStagesPart;

  py::enum_<Action>(m, "Action")
      .value("IDLE", Action::kIdle)
      .value("STEP", Action::kStep)
      .value("CATCH_UP", Action::kCatchUp)
      .value("WAIT", Action::kWait)
      .value("FINISHED", Action::kFinished);

  py::class_<Block>(m, "Block")
      .def(py::init([](std::uintptr_t base) { return attach(pointer(base)); }), py::arg("base"))
      .def_static("bytes", &Block::bytes, py::arg("stages"), py::arg("rows"), py::arg("capacity"),
                  py::arg("alignment") = kLine)
      .def_static(
          "part_bytes",
          [](std::uint32_t stages, std::uint32_t rows, std::uint32_t capacity,
             std::uint32_t alignment) {
            std::vector<std::size_t> out;
            for (std::uint32_t part = 0; part < stages + kFirstStagesPart; ++part)
              out.push_back(Block::part_bytes(part, stages, rows, capacity, alignment));
            return out;
          },
          py::arg("stages"), py::arg("rows"), py::arg("capacity"), py::arg("alignment"))
      .def_static(
          "create",
          [](std::uintptr_t base, std::uint32_t stages, std::uint32_t rows, std::uint32_t capacity,
             std::uint32_t alignment) {
            return Block::create(pointer(base), stages, rows, capacity, alignment);
          },
          py::arg("base"), py::arg("stages"), py::arg("rows"), py::arg("capacity"),
          py::arg("alignment") = kLine)
      .def_property_readonly("stages", &Block::stages)
      .def_property_readonly("rows", &Block::rows)
      .def_property_readonly("capacity", &Block::capacity)
      .def_property_readonly("size", &Block::size)
      .def_property_readonly("is_intact", &is_intact)
      .def("reset", &reset, py::arg("starts"), py::arg("limits"), py::arg("last"), py::arg("eos"))
      .def("start", &start, py::arg("generation"))
      .def("length", checked([](const Block& b, std::uint32_t s, std::uint32_t r) {
             return Sequence(b, s, r).word().length;
           }))
      .def("epoch", checked([](const Block& b, std::uint32_t s, std::uint32_t r) {
             return Sequence(b, s, r).word().epoch;
           }))
      .def("kv", checked([](const Block& b, std::uint32_t s, std::uint32_t r) {
             return b.priv(s, r).kv;
           }))
      .def(
          "tokens",
          [](const Block& b, std::uint32_t s, std::uint32_t r, std::uint32_t begin,
             std::uint32_t end) {
            check_stage(b, s);
            check_row(b, r);
            return tokens(b, s, r, begin, end);
          },
          py::arg("stage"), py::arg("row"), py::arg("begin"), py::arg("end"))
      .def("counters", checked(&counters), py::arg("stage"), py::arg("row"))
      .def("set_alive",
           [](const Block& b, std::uint32_t s, bool alive) {
             check_stage(b, s);
             store_release(&b.control(s).alive, alive ? 1u : 0u);
           })
      .def("is_alive",
           [](const Block& b, std::uint32_t s) {
             check_stage(b, s);
             return load_acquire(&b.control(s).alive) != 0;
           })
      .def("set_lookahead", &set_lookahead, py::arg("stage"), py::arg("lookahead"))
      .def(
          "end_row",
          [](const Block& b, std::uint32_t r) {
            check_row(b, r);
            end_row(b, r);
          },
          py::arg("row"));

  // Python keeps the block's memory as an attribute.
  py::class_<StagePort>(m, "StagePort", py::dynamic_attr())
      .def(py::init<const Block&, std::uint32_t, std::uint32_t>(), py::arg("block"),
           py::arg("stage"), py::arg("width"))
      .def("plan", &StagePort::plan, py::arg("lookahead"), py::arg("max_draft_tokens"),
           py::arg("min_draft_tokens"))
      .def(
          "commit",
          [](StagePort& p, std::uintptr_t selected, std::int64_t stride) {
            if (selected == 0 && p.selects())
              throw std::invalid_argument("rows select a token, so commit() needs their choices");
            if (p.selects() && (stride < 1 || stride > p.width()))
              throw std::invalid_argument("a row of choices has 1 to " + std::to_string(p.width()) +
                                          " tokens, not " + std::to_string(stride));
            return p.commit(reinterpret_cast<const std::int32_t*>(selected), stride);
          },
          py::arg("selected"), py::arg("stride"))
      .def("park", &StagePort::park, py::arg("timeout_ns"),
           py::call_guard<py::gil_scoped_release>())
      .def("ring", &StagePort::ring)
      .def("pause", &StagePort::pause, py::arg("timeout_ns"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("lookahead", &StagePort::lookahead)
      .def_property_readonly("upstream_lookahead", &StagePort::upstream_lookahead)
      .def("trace", &StagePort::trace, py::arg("buffer"), py::keep_alive<1, 2>())
      .def_property_readonly("generation", &StagePort::generation)
      .def_property_readonly("columns", &StagePort::columns)
      .def_property_readonly("width", &StagePort::width)
      .def_property_readonly("tokens",
                             [](py::object self) {
                               auto& p = self.cast<StagePort&>();
                               return view(p.tokens(), {p.rows(), p.width()}, self);
                             })
      .def_property_readonly("kv",
                             [](py::object self) {
                               auto& p = self.cast<StagePort&>();
                               return view(p.kv(), {p.rows()}, self);
                             })
      .def_property_readonly("query_lens",
                             [](py::object self) {
                               auto& p = self.cast<StagePort&>();
                               return view(p.query_lens(), {p.rows()}, self);
                             })
      .def_property_readonly("num_draft_tokens",
                             [](py::object self) {
                               auto& p = self.cast<StagePort&>();
                               return view(p.num_draft_tokens(), {p.rows()}, self);
                             })
      .def_property_readonly("n_select", [](py::object self) {
        auto& p = self.cast<StagePort&>();
        return view(p.n_select(), {p.rows()}, self);
      });
}

}  // namespace pipespec
