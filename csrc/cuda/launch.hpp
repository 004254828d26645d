// A kernel launch as a function call. This is plain C++, unlike `<<<>>>`, so the native tests
// compile the same file over a runtime of their own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pipespec::cuda {

// `stream`: a cudaStream_t. The arguments are converted to the kernel's parameters.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), std::uint32_t blocks, std::uint32_t threads,
                   std::uintptr_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace pipespec::cuda
