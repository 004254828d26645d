#include <cuda_runtime.h>

#include "cuda/protocol_kernels.hpp"

namespace pipespec::cuda {
namespace {

// One thread per row: a row's walk over its tokens is sequential and short, and rows are few.
constexpr std::uint32_t kThreads = 32;

std::uint32_t blocks_for(std::uint32_t rows) { return (rows + kThreads - 1) / kThreads; }

__global__ void __launch_bounds__(kThreads)
    PlanKernel(void* base, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
               const Policy* policy, StepArrays out) {
  const std::uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= rows) return;
  plan_row(Block(base), stage, row,
           Policy{policy->window, policy->max_hints, policy->min_hints, width}, out);
}

__global__ void __launch_bounds__(kThreads)
    CommitKernel(void* base, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
                 StepArrays in, const std::int32_t* selected, std::int64_t stride) {
  const std::uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= rows) return;
  commit_row(Block(base), stage, row, width, in, selected + row * stride);
}

}  // namespace

cudaError_t plan(void* block, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
                 const Policy* policy, const StepArrays& out, std::uintptr_t stream) {
  if (rows == 0) return cudaSuccess;
  PlanKernel<<<blocks_for(rows), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      block, stage, rows, width, policy, out);
  return cudaGetLastError();
}

cudaError_t commit(void* block, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
                   const StepArrays& step, const std::int32_t* selected, std::int64_t stride,
                   std::uintptr_t stream) {
  if (rows == 0) return cudaSuccess;
  CommitKernel<<<blocks_for(rows), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      block, stage, rows, width, step, selected, stride);
  return cudaGetLastError();
}

}  // namespace pipespec::cuda
