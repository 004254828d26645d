#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/device.hpp"

namespace pipespec::cuda {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: leave no error behind for the next call to report
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + " (CUDA error " +
                           std::to_string(static_cast<int>(error)) + ")");
}

int runtime_version() {
  int version = 0;
  check(cudaRuntimeGetVersion(&version), "CUDA runtime version");
  return version;
}

int driver_version() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "CUDA driver version");
  return version;
}

std::vector<Device> devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "no usable CUDA device");
  std::vector<Device> found;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp prop;
    check(cudaGetDeviceProperties(&prop, i), "CUDA device properties");
    found.push_back(
        {prop.name, prop.major, prop.minor, prop.multiProcessorCount, prop.totalGlobalMem});
  }
  return found;
}

}  // namespace pipespec::cuda
