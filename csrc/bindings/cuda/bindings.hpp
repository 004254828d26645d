// What each file of CUDA bindings adds to the module. module.cpp calls them in this order.
#pragma once

#include <pybind11/pybind11.h>

namespace pipespec::cuda {

void bind_device(pybind11::module_& m);    // device.cpp
void bind_protocol(pybind11::module_& m);  // protocol.cpp: plan and commit as kernels
void bind_launcher(pybind11::module_& m);  // launcher.cpp: graphs for the scheduler
void bind_litmus(pybind11::module_& m);    // litmus.cpp: whether devices keep stores in order

}  // namespace pipespec::cuda
