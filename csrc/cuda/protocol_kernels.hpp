// plan() and commit() as kernels over every row of a batch, so that a step needs no numbers from
// the host. All pointers are to memory that the device can read and write (its own, or pinned and
// mapped). Nothing here synchronises or allocates, so a CUDA graph can capture a launch. The graph
// fixes the arguments, and not the memory that they point to.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/rectangle.hpp"

namespace pipespec::cuda {

struct StepScratch;

// Fills `out` for rows 0 .. rows-1 of `stage`. `scope`: kDevice where the block is in the memory of
// the device that all stages run on, else kSystem.
// `policies` is read when the kernel runs: change it between two launches of one graph. With
// `scratch` it is a ring of StepLog::kRecords, of which step n uses number n % kRecords; without,
// it is one policy. Its `width` is not used; that of the rectangle is an argument. `stream`: a
// cudaStream_t.
cudaError_t plan(void* block, Scope scope, std::uint32_t stage, std::uint32_t rows,
                 std::uint32_t width, const StepPolicy* policies, const StepScratch* scratch,
                 const StepArrays& out, std::uintptr_t stream);

// `step` as plan() filled it; `selected`: what verify gives for it, rows `stride` elements apart.
// The host wakes stages that wait for the publication (runtime/park.hpp).
cudaError_t commit(void* block, Scope scope, std::uint32_t stage, std::uint32_t rows,
                   std::uint32_t width, const StepArrays& step, const std::int32_t* selected,
                   std::int64_t stride, std::uintptr_t stream);

// The results of a stage's steps for the host, in pinned and mapped memory. Zero at first.
struct StepLog {
  static constexpr std::uint32_t kRecords = 8;
  struct Record {
    std::uint64_t start_ns;  // of %globaltimer
    std::uint64_t end_ns;
    std::uint32_t fed;  // summed over the rows, as in Outcome (runtime/launcher.hpp)
    std::uint32_t draft_tokens;
    std::uint32_t accepted;
    std::uint32_t rolled_back;
    std::uint32_t rollbacks;
  };
  std::uint64_t ended;       // steps; stored after everything that they wrote
  Record records[kRecords];  // of step n: records[n % kRecords]
};

// The state of a stage between its steps, in memory of the device. Zero before each generation,
// except `ended`.
struct StepScratch {
  std::uint64_t ended;
  std::uint64_t start_ns;
  std::uint32_t accepted;  // of all steps of the generation, modulo 2^32
  std::uint32_t truncated;
  std::uint32_t rollbacks;
};

// First node of a step: notes the time.
cudaError_t open_step(StepScratch* scratch, std::uintptr_t stream);

// Last node of a step: copies the stage's part of the block to `host shadow` (nothing, if that is
// the block), then writes the record.
cudaError_t close_step(void* block, void* shadow, std::uint32_t stage, std::uint32_t rows,
                       const StepArrays& step, StepScratch* scratch, StepLog* log,
                       std::uintptr_t stream);

// Stores %globaltimer, for comparison with the host's clock.
cudaError_t read_clock(std::uint64_t* out, std::uintptr_t stream);

}  // namespace pipespec::cuda
