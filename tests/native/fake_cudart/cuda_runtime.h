// The language of kernels as C++: a kernel is a function, and the threads of a warp run it one
// after the other, each until the next operation of the whole warp. See fake_cudart.hpp.
#pragma once

#include <functional>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};
inline constinit thread_local uint3 threadIdx{0, 0, 0};
inline constinit thread_local uint3 blockIdx{0, 0, 0};
inline constinit thread_local dim3 blockDim{};
inline constinit thread_local dim3 gridDim{};

// A sanitizer makes every change of threads dear.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr unsigned warpSize = 8;
#else
inline constexpr unsigned warpSize = 32;
#endif

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace fake_cudart {

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread);

// Called by every thread of the warp with the same name. Returns their values, one per thread.
const std::uint64_t* exchange(unsigned mask, const char* name, std::uint64_t value);

}  // namespace fake_cudart

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  return fake_cudart::launch(
      *config, [kernel, ... given = static_cast<Parameters>(arguments)] { kernel(given...); });
}

// What %globaltimer holds: another clock than the host's.
std::uint64_t fake_globaltimer();

inline void __syncwarp(unsigned mask = ~0u) { fake_cudart::exchange(mask, "__syncwarp", 0); }
// The value of one thread, for all of them.
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  static_assert(std::is_integral_v<T>);
  return static_cast<T>(
      fake_cudart::exchange(mask, "__shfl_sync", static_cast<std::uint64_t>(value))[lane]);
}

inline unsigned __ballot_sync(unsigned mask, bool yes) {
  const std::uint64_t* values = fake_cudart::exchange(mask, "__ballot_sync", yes ? 1 : 0);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) ballot |= values[lane] != 0 ? 1u << lane : 0u;
  return ballot;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const std::uint64_t* values = fake_cudart::exchange(mask, "__reduce_add_sync", value);
  unsigned sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(values[lane]);
  return sum;
}
