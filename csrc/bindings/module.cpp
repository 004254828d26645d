// pipespec_kernels._native: the host core. It takes pointers and integers, and depends on neither
// torch nor CUDA.
#include "bindings/bindings.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "The native host core of pipespec: state protocol, row selection and forwards.";
  pipespec::bind_build_info(m);
  pipespec::bind_select(m);
  pipespec::bind_decoder(m);
  pipespec::bind_formats(m);
  pipespec::bind_attention(m);
  pipespec::bind_trace(m);
  pipespec::bind_state(m);
  pipespec::bind_replica(m);
  pipespec::bind_ngram(m);
  pipespec::bind_schedule(m);
  pipespec::bind_watch(m);
}
