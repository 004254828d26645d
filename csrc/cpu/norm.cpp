#include "norm.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.hpp"

namespace pipespec::cpu {

void add_rms_norm(const NormTask& task) {
  const bool wide = task.dtype == DType::kFloat32;
  const DecoderKernels& kernels = cpu::kernels().decoder;
  // Kept, since a new one would be filled with zeros, and from a whole cache line on: vectors that
  // lie in two lines cost 15 % of the time.
  constexpr size_t kLine = 64;
  thread_local std::vector<float> storage;
  storage.resize(std::max(storage.size(), 2 * size_t(task.hidden) + kLine / sizeof(float)));
  void* place_of_scratch = storage.data();
  size_t room = storage.size() * sizeof(float);
  float* const scratch = static_cast<float*>(
      std::align(kLine, 2 * size_t(task.hidden) * sizeof(float), place_of_scratch, room));
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
         place(task.total, row, task.total_stride), scratch, task.hidden, task.eps,
         task.one_plus_weight});
  }
}

}  // namespace pipespec::cpu
