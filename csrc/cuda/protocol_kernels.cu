#include <cuda_runtime.h>

#include "cuda/protocol_kernels.hpp"
#include "protocol/commit.hpp"
#include "protocol/replicate.hpp"

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

__device__ std::uint64_t Now() {
  std::uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void ClockKernel(std::uint64_t* out) { *out = Now(); }

// One warp, so that one of its lanes knows when all have written.
__global__ void __launch_bounds__(kThreads)
    CloseStepKernel(void* base, void* mirror, std::uint32_t stage, std::uint32_t rows,
                    StepArrays step, StepScratch* scratch, StepLog* log) {
  const Block block(base);
  const Block copy(mirror);
  std::uint32_t fed = 0, hints = 0, accepted = 0, truncated = 0, rollbacks = 0;
  for (std::uint32_t row = threadIdx.x; row < rows; row += kThreads) {
    if (row >= block.header().active_rows) break;
    if (mirror != base) replicate(block, copy, stage, row);
    fed += static_cast<std::uint32_t>(step.n_fed[row]);
    hints += static_cast<std::uint32_t>(step.n_hint[row]);
    // Modulo 2^32: their differences are small.
    const Counters& counters = block.priv(stage, row).counters;
    accepted += static_cast<std::uint32_t>(counters.accepted);
    truncated += static_cast<std::uint32_t>(counters.truncated);
    rollbacks += static_cast<std::uint32_t>(counters.rollbacks);
  }
  fed = __reduce_add_sync(~0u, fed);
  hints = __reduce_add_sync(~0u, hints);
  accepted = __reduce_add_sync(~0u, accepted);
  truncated = __reduce_add_sync(~0u, truncated);
  rollbacks = __reduce_add_sync(~0u, rollbacks);
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x != 0) return;
  const std::uint64_t number = scratch->ended++;
  log->records[number % StepLog::kRecords] = {scratch->start_ns,
                                              Now(),
                                              fed,
                                              hints,
                                              accepted - scratch->accepted,
                                              truncated - scratch->truncated,
                                              rollbacks - scratch->rollbacks};
  scratch->accepted = accepted;
  scratch->truncated = truncated;
  scratch->rollbacks = rollbacks;
  store_release(&log->ended, number + 1);
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

cudaError_t open_step(StepScratch* scratch, std::uintptr_t stream) {
  return read_clock(&scratch->start_ns, stream);
}

cudaError_t close_step(void* block, void* mirror, std::uint32_t stage, std::uint32_t rows,
                       const StepArrays& step, StepScratch* scratch, StepLog* log,
                       std::uintptr_t stream) {
  CloseStepKernel<<<1, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      block, mirror, stage, rows, step, scratch, log);
  return cudaGetLastError();
}

cudaError_t read_clock(std::uint64_t* out, std::uintptr_t stream) {
  ClockKernel<<<1, 1, 0, reinterpret_cast<cudaStream_t>(stream)>>>(out);
  return cudaGetLastError();
}

}  // namespace pipespec::cuda
