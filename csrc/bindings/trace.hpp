// Entries of a trace as a structured array of numpy's.
#pragma once

#include <pybind11/numpy.h>

#include <vector>

#include "../runtime/trace.hpp"

namespace pipespec {

pybind11::array as_array(const std::vector<TraceEntry>& entries);  // trace.cpp

}  // namespace pipespec
