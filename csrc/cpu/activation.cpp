#include "activation.hpp"

#include "kernels.hpp"

namespace pipespec::cpu {

void gated_activation(const GateTask& task) {
  const bool wide = task.dtype == DType::kFloat32;
  const int64_t item = wide ? 4 : 2;
  const DecoderKernels& kernels = cpu::kernels().decoder;
  for (int64_t row = 0; row < task.rows; ++row) {
    const char* const gate = static_cast<const char*>(task.gate_up) + row * task.stride * item;
    char* const out = static_cast<char*>(task.out) + row * task.out_stride * item;
    (wide ? kernels.gate_row32 : kernels.gate_row16)(
        task.activation, {gate, gate + task.size * item, out, task.size});
  }
}

}  // namespace pipespec::cpu
