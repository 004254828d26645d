#include <cuda_runtime.h>

#include "cuda/launch.hpp"
#include "cuda/litmus.hpp"
#include "cuda/warp.hpp"

namespace pipespec::cuda {
namespace {

template <Scope kScope>
__global__ void __launch_bounds__(kWarp)
    LitmusWriteKernel(void* base, std::uint32_t stage, std::uint32_t row, std::uint32_t epochs,
                      std::uint32_t length) {
  pipespec::litmus_write(Block(base, kScope), stage, row, epochs, length, Warp());
}

template <Scope kScope>
__global__ void __launch_bounds__(kWarp)
    LitmusReadKernel(void* base, std::uint32_t stage, std::uint32_t row, std::uint32_t looks,
                     LitmusCount* out) {
  const LitmusCount count = pipespec::litmus_read(Block(base, kScope), stage, row, looks, Warp());
  if (threadIdx.x == 0) *out = count;
}

}  // namespace

cudaError_t litmus_write(void* block, Scope scope, std::uint32_t stage, std::uint32_t row,
                         std::uint32_t epochs, std::uint32_t length, std::uintptr_t stream) {
  const auto kernel = scope == Scope::kDevice ? LitmusWriteKernel<Scope::kDevice>
                                              : LitmusWriteKernel<Scope::kSystem>;
  return launch(kernel, 1, kWarp, stream, block, stage, row, epochs, length);
}

cudaError_t litmus_read(void* block, Scope scope, std::uint32_t stage, std::uint32_t row,
                        std::uint32_t looks, LitmusCount* out, std::uintptr_t stream) {
  const auto kernel =
      scope == Scope::kDevice ? LitmusReadKernel<Scope::kDevice> : LitmusReadKernel<Scope::kSystem>;
  return launch(kernel, 1, kWarp, stream, block, stage, row, looks, out);
}

}  // namespace pipespec::cuda
