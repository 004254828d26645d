#include "norm.hpp"

#include <vector>

#include "decoder_kernels.hpp"

namespace pipespec::cpu {

void add_rms_norm(const NormTask& task) {
  const bool wide = task.dtype == DType::kFloat32;
  const DecoderKernels& kernels = decoder_kernels();
  std::vector<float> scratch(2 * size_t(task.hidden));
  const auto at = [&](const void* rows, int64_t row, int64_t stride) {
    return rows == nullptr ? nullptr
                           : static_cast<const char*>(rows) + row * stride * int64_t{wide ? 4 : 2};
  };
  const auto place = [&](void* rows, int64_t row, int64_t stride) {
    return const_cast<char*>(at(rows, row, stride));
  };
  for (int64_t row = 0; row < task.rows; ++row) {
    (wide ? kernels.norm_row32 : kernels.norm_row16)(
        {at(task.x, row, task.x_stride), at(task.residual, row, task.residual_stride), task.weight,
         task.bias, place(task.out, row, task.out_stride),
         place(task.total, row, task.total_stride), scratch.data(), task.hidden, task.eps,
         task.one_plus_weight});
  }
}

}  // namespace pipespec::cpu
