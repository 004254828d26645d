// plan() and commit() on the device, so that a step need not come back to the host for its numbers:
// launches of csrc/protocol/ over every row of a batch. All pointers are to memory that the device
// can read and write (its own, or pinned and mapped). Nothing here synchronises or allocates, so a
// launch can be captured into a CUDA graph; the arguments are then fixed, what they point to is
// not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/rectangle.hpp"

namespace pipespec::cuda {

// Fills `out` for rows 0 .. rows-1 of `stage`.
// `policy` is read when the kernel runs: change it between two launches of one graph. Its `width`
// is not used; that of the rectangle is an argument. `stream`: a cudaStream_t.
cudaError_t plan(void* block, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
                 const Policy* policy, const StepArrays& out, std::uintptr_t stream);

// `step` as plan() filled it; `selected`: what verify gives for it, rows `stride` elements apart.
// Waking whoever waits for the news is the host's business (runtime/park.hpp).
cudaError_t commit(void* block, std::uint32_t stage, std::uint32_t rows, std::uint32_t width,
                   const StepArrays& step, const std::int32_t* selected, std::int64_t stride,
                   std::uintptr_t stream);

}  // namespace pipespec::cuda
