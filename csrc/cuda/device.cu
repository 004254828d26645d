#include <cuda_runtime.h>

#include "cuda/check.hpp"
#include "cuda/device.hpp"

namespace pipespec::cuda {

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
