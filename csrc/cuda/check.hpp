// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace pipespec::cuda {

// Throws std::runtime_error: what failed, and why.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: leave no error behind for the next call to report
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + " (CUDA error " +
                           std::to_string(static_cast<int>(error)) + ")");
}

}  // namespace pipespec::cuda
