// Bindings of what notices changes: of memory, and of the Python objects that a model's code is.
#include "../cpu/watch.hpp"

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace pipespec {
namespace {

// A version of a class that differs after each change of it or of its base classes; 0: there is
// none. It is the one by which Python's own caches of attributes are valid.
unsigned int version_of(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  // A look for a name assigns it.
  if (PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "no such name"))
    Py_DECREF(found);
  PyErr_Clear();
#endif
  return type->tp_version_tag;
}

// What some Python objects are. It keeps what it compares, so that no other object takes the place
// of one.
class Stamp {
 public:
  // `containers` are dictionaries and lists. Of objects the classes are compared, of functions
  // the code objects.
  Stamp(const py::list& containers, const py::list& objects, const py::list& functions,
        const py::list& classes) {
    for (const py::handle& each : containers) add_container(each.ptr());
    for (const py::handle& each : objects)
      objects_.emplace_back(keep(each.ptr()),
                            reinterpret_cast<PyTypeObject*>(keep(py::type::handle_of(each).ptr())));
    for (const py::handle& each : functions) {
      if (!PyFunction_Check(each.ptr())) throw py::type_error("functions must be functions");
      functions_.emplace_back(keep(each.ptr()), keep(PyFunction_GetCode(each.ptr())));
    }
    for (const py::handle& each : classes) {
      if (!PyType_Check(each.ptr())) throw py::type_error("classes must be classes");
      auto* type = reinterpret_cast<PyTypeObject*>(keep(each.ptr()));
      classes_.emplace_back(type, version_of(type));
    }
  }

  bool is_current() {
    for (const auto& [type, version] : classes_)
      if (version == 0 || type->tp_version_tag != version) return false;
    for (const auto& [function, code] : functions_)
      if (PyFunction_GET_CODE(function) != code) return false;
    for (const auto& [object, type] : objects_)
      if (Py_TYPE(object) != type) return false;
    for (Container& each : containers_)
      if (!is_same(each)) return false;
    return true;
  }

 private:
  struct Container {
    PyObject* object;
    std::size_t begin, size;  // of its keys and values
    std::uint64_t version;
  };

  PyObject* keep(PyObject* object) {
    kept_.push_back(py::reinterpret_borrow<py::object>(object));
    return object;
  }

  static std::uint64_t version_of_dict([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
    return 0;  // deprecated, and later gone: keys and values are compared each time
#endif
  }

  void add_container(PyObject* object) {
    const std::size_t begin = items_.size();
    if (PyDict_Check(object)) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &value);)
        items_.insert(items_.end(), {keep(key), keep(value)});
    } else if (PyList_Check(object)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i)
        items_.push_back(keep(PyList_GET_ITEM(object, i)));
    } else {
      throw py::type_error("containers must be dictionaries or lists");
    }
    keep(object);
    containers_.push_back(
        {object, begin, items_.size() - begin, PyDict_Check(object) ? version_of_dict(object) : 0});
  }

  bool is_same(Container& each) {
    PyObject* const* expected = items_.data() + each.begin;
    if (PyList_Check(each.object)) {
      if (static_cast<std::size_t>(PyList_GET_SIZE(each.object)) != each.size) return false;
      for (std::size_t i = 0; i < each.size; ++i)
        if (PyList_GET_ITEM(each.object, static_cast<Py_ssize_t>(i)) != expected[i]) return false;
      return true;
    }
    const std::uint64_t version = version_of_dict(each.object);
    if (version != 0 && version == each.version) return true;
    if (2 * static_cast<std::size_t>(PyDict_Size(each.object)) != each.size) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(each.object, &at, &key, &value); expected += 2)
      if (key != expected[0] || value != expected[1]) return false;
    each.version = version;
    return true;
  }

  std::vector<py::object> kept_;
  std::vector<PyObject*> items_;
  std::vector<Container> containers_;
  std::vector<std::pair<PyObject*, PyTypeObject*>> objects_;
  std::vector<std::pair<PyObject*, PyObject*>> functions_;
  std::vector<std::pair<PyTypeObject*, unsigned int>> classes_;
};

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<Stamp>(m, "Stamp")
      .def(py::init<const py::list&, const py::list&, const py::list&, const py::list&>(),
           py::arg("containers"), py::arg("objects"), py::arg("functions"), py::arg("classes"))
      .def("is_current", &Stamp::is_current);
  py::class_<cpu::MemoryWatch>(m, "MemoryWatch")
      .def(py::init<>())
      .def(
          "add",
          [](cpu::MemoryWatch& watch, std::uintptr_t address, std::size_t bytes,
             std::size_t stride) {
            if (stride == 0) throw std::invalid_argument("the stride must not be 0");
            watch.add(reinterpret_cast<const void*>(address), bytes, stride);
          },
          py::arg("address"), py::arg("bytes"), py::arg("stride"))
      .def("remember", &cpu::MemoryWatch::remember, py::arg("threads"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "remember_block",
          [](cpu::MemoryWatch& watch, std::uintptr_t address, std::size_t bytes) {
            watch.remember_block(reinterpret_cast<const void*>(address), bytes);
          },
          py::arg("address"), py::arg("bytes"))
      // With the lock of the interpreter: it is the one of the places that a check goes on at.
      .def_property_readonly("has_rest", &cpu::MemoryWatch::has_rest)
      .def("agree", &cpu::MemoryWatch::agree, py::arg("seconds"))
      .def("rest_agrees", &cpu::MemoryWatch::rest_agrees, py::arg("threads"))
      .def_property_readonly("samples", &cpu::MemoryWatch::samples)
      .def_property_readonly("bytes", &cpu::MemoryWatch::bytes);
}

}  // namespace pipespec
