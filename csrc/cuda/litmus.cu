#include <cuda_runtime.h>

#include "cuda/litmus.hpp"

namespace pipespec::cuda {
namespace {

__global__ void LitmusWriteKernel(void* base, std::uint32_t stage, std::uint32_t row,
                                  std::uint32_t epochs, std::uint32_t length) {
  pipespec::litmus_write(Block(base), stage, row, epochs, length);
}

__global__ void LitmusReadKernel(void* base, std::uint32_t stage, std::uint32_t row,
                                 std::uint32_t looks, LitmusCount* out) {
  *out = pipespec::litmus_read(Block(base), stage, row, looks);
}

}  // namespace

cudaError_t litmus_write(void* block, std::uint32_t stage, std::uint32_t row, std::uint32_t epochs,
                         std::uint32_t length, std::uintptr_t stream) {
  LitmusWriteKernel<<<1, 1, 0, reinterpret_cast<cudaStream_t>(stream)>>>(block, stage, row, epochs,
                                                                         length);
  return cudaGetLastError();
}

cudaError_t litmus_read(void* block, std::uint32_t stage, std::uint32_t row, std::uint32_t looks,
                        LitmusCount* out, std::uintptr_t stream) {
  LitmusReadKernel<<<1, 1, 0, reinterpret_cast<cudaStream_t>(stream)>>>(block, stage, row, looks,
                                                                        out);
  return cudaGetLastError();
}

}  // namespace pipespec::cuda
