#include <cuda_runtime.h>

#include "cuda/launch.hpp"
#include "cuda/protocol_kernels.hpp"
#include "cuda/warp.hpp"
#include "protocol/commit.hpp"
#include "protocol/replicate.hpp"

namespace pipespec::cuda {
namespace {

template <Scope kScope>
__global__ void __launch_bounds__(kWarp)
    PlanKernel(void* base, std::uint32_t stage, std::uint32_t width, const StepPolicy* policies,
               const StepScratch* scratch, StepArrays out) {
  const StepPolicy& given = policies[scratch == nullptr ? 0 : scratch->ended % StepLog::kRecords];
  plan_row(Block(base, kScope), stage, blockIdx.x,
           StepPolicy{given.lookahead, given.max_draft_tokens, given.min_draft_tokens, width}, out,
           Warp());
}

template <Scope kScope>
__global__ void __launch_bounds__(kWarp)
    CommitKernel(void* base, std::uint32_t stage, std::uint32_t width, StepArrays in,
                 const std::int32_t* selected, std::int64_t stride) {
  const std::uint32_t row = blockIdx.x;
  commit_row(Block(base, kScope), stage, row, width, in, selected + row * stride, Warp());
}

__device__ std::uint64_t Now() {
  std::uint64_t ns;
#if defined(__CUDACC__)
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
#else
  ns = fake_globaltimer();  // of the tests' runtime
#endif
  return ns;
}

__global__ void ClockKernel(std::uint64_t* out) { *out = Now(); }

// One warp for all rows, so that they share their releases. The host shadow is the host's as well:
// it has system scope whatever the block's.
__global__ void __launch_bounds__(kWarp)
    CloseStepKernel(void* base, void* shadow, std::uint32_t stage, std::uint32_t rows,
                    StepArrays step, StepScratch* scratch, StepLog* log) {
  const Warp lanes;
  const Block block(base, Scope::kDevice);
  rows = detail::min(rows, block.header().active_rows);
  if (shadow != base) replicate(block, Block(shadow), stage, 0, rows, lanes);
  std::uint32_t fed = 0, draft_tokens = 0, accepted = 0, truncated = 0, rollbacks = 0;
  for (std::uint32_t row = lanes.index(); row < rows; row += Warp::kCount) {
    fed += static_cast<std::uint32_t>(step.query_lens[row]);
    draft_tokens += static_cast<std::uint32_t>(step.num_draft_tokens[row]);
    // Modulo 2^32: their differences are small.
    const Counters& counters = block.priv(stage, row).counters;
    accepted += static_cast<std::uint32_t>(counters.accepted);
    truncated += static_cast<std::uint32_t>(counters.truncated);
    rollbacks += static_cast<std::uint32_t>(counters.rollbacks);
  }
  fed = lanes.sum(fed);
  draft_tokens = lanes.sum(draft_tokens);
  accepted = lanes.sum(accepted);
  truncated = lanes.sum(truncated);
  rollbacks = lanes.sum(rollbacks);
  lanes.sync();
  if (lanes.index() != 0) return;
  const std::uint64_t number = scratch->ended++;
  log->records[number % StepLog::kRecords] = {scratch->start_ns,
                                              Now(),
                                              fed,
                                              draft_tokens,
                                              accepted - scratch->accepted,
                                              truncated - scratch->truncated,
                                              rollbacks - scratch->rollbacks};
  scratch->accepted = accepted;
  scratch->truncated = truncated;
  scratch->rollbacks = rollbacks;
  store_release(&log->ended, number + 1);
}

}  // namespace

cudaError_t plan(void* block, Scope scope, std::uint32_t stage, std::uint32_t rows,
                 std::uint32_t width, const StepPolicy* policies, const StepScratch* scratch,
                 const StepArrays& out, std::uintptr_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto kernel =
      scope == Scope::kDevice ? PlanKernel<Scope::kDevice> : PlanKernel<Scope::kSystem>;
  return launch(kernel, rows, kWarp, stream, block, stage, width, policies, scratch, out);
}

cudaError_t commit(void* block, Scope scope, std::uint32_t stage, std::uint32_t rows,
                   std::uint32_t width, const StepArrays& step, const std::int32_t* selected,
                   std::int64_t stride, std::uintptr_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto kernel =
      scope == Scope::kDevice ? CommitKernel<Scope::kDevice> : CommitKernel<Scope::kSystem>;
  return launch(kernel, rows, kWarp, stream, block, stage, width, step, selected, stride);
}

cudaError_t open_step(StepScratch* scratch, std::uintptr_t stream) {
  return read_clock(&scratch->start_ns, stream);
}

cudaError_t close_step(void* block, void* shadow, std::uint32_t stage, std::uint32_t rows,
                       const StepArrays& step, StepScratch* scratch, StepLog* log,
                       std::uintptr_t stream) {
  return launch(CloseStepKernel, 1, kWarp, stream, block, shadow, stage, rows, step, scratch, log);
}

cudaError_t read_clock(std::uint64_t* out, std::uintptr_t stream) {
  return launch(ClockKernel, 1, 1, stream, out);
}

}  // namespace pipespec::cuda
