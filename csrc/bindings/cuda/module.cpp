// pipespec_kernels._cuda: the kernels for CUDA devices. The import makes no call to the driver.
#include "bindings/cuda/bindings.hpp"

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The CUDA part of pipespec's native core.";
  pipespec::cuda::bind_device(m);
  pipespec::cuda::bind_protocol(m);
  pipespec::cuda::bind_launcher(m);
  pipespec::cuda::bind_litmus(m);
}
