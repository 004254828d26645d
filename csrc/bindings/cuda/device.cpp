// device_count(), devices(), runtime_version(), driver_version().
#include "cuda/device.hpp"

#include "bindings/cuda/bindings.hpp"

namespace py = pybind11;

namespace pipespec::cuda {

void bind_device(py::module_& m) {
  m.def("runtime_version", &runtime_version,
        "Version of the CUDA runtime in this module, e.g. 13000.");
  m.def("driver_version", &driver_version,
        "Newest CUDA version that the driver supports; 0 without a driver.");
  m.def(
      "device_count", [] { return devices().size(); },
      "Number of CUDA devices; RuntimeError says why there is none.");
  m.def(
      "devices",
      [] {
        py::list list;
        for (const Device& device : devices()) {
          py::dict entry;
          entry["name"] = device.name;
          entry["capability"] = py::make_tuple(device.major, device.minor);
          entry["multiprocessors"] = device.multiprocessors;
          entry["memory_bytes"] = device.memory_bytes;
          list.append(entry);
        }
        return list;
      },
      "One dict per CUDA device; RuntimeError says why there is none.");
}

}  // namespace pipespec::cuda
