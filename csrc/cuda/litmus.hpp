// The litmus test of protocol/litmus.hpp with GPUs as writer and reader.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "protocol/litmus.hpp"

namespace pipespec::cuda {

// `block`: device memory, or pinned and mapped. One warp; `stream`: a cudaStream_t.
cudaError_t litmus_write(void* block, Scope scope, std::uint32_t stage, std::uint32_t row,
                         std::uint32_t epochs, std::uint32_t length, std::uintptr_t stream);
// `out`: where the device can write.
cudaError_t litmus_read(void* block, Scope scope, std::uint32_t stage, std::uint32_t row,
                        std::uint32_t looks, LitmusCount* out, std::uintptr_t stream);

}  // namespace pipespec::cuda
