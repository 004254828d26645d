// What each file of bindings adds to the module. module.cpp calls them in this order.
#pragma once

#include <pybind11/pybind11.h>

namespace pipespec {

void bind_build_info(pybind11::module_& m);  // build_info.cpp
void bind_select(pybind11::module_& m);      // select.cpp: argmax and verification on the host
void bind_decoder(pybind11::module_& m);     // decoder.cpp: a forward on the host
void bind_formats(pybind11::module_& m);     // formats.cpp: products with quantised matrices
void bind_attention(pybind11::module_& m);   // attention.cpp: attention over storage on the host
void bind_state(pybind11::module_& m);       // state.cpp: the state block, plan, commit
void bind_replica(pybind11::module_& m);     // replica.cpp: messages between ranks
void bind_ngram(pybind11::module_& m);       // ngram.cpp: prompt lookup
void bind_schedule(pybind11::module_& m);    // schedule.cpp: the scheduler and the host launcher
void bind_trace(pybind11::module_& m);       // trace.cpp: what the steps of a stage did
void bind_watch(pybind11::module_& m);  // watch.cpp: what notices changes of objects and memory

}  // namespace pipespec
