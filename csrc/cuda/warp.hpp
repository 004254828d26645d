// The lanes of protocol/lanes.hpp on a device: all threads of a warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "protocol/lanes.hpp"

namespace pipespec::cuda {

#if defined(__CUDACC__)
inline constexpr std::uint32_t kWarp = 32;
#else
inline constexpr std::uint32_t kWarp = warpSize;  // of the tests' runtime
#endif

#if defined(__CUDACC__) && !defined(__CUDA_ARCH__)
using Warp = OneLane;  // nvcc's pass over the host's code, which calls no kernel
#else
struct Warp {
  static constexpr std::uint32_t kCount = kWarp;
  [[nodiscard]] PIPESPEC_HD std::uint32_t index() const { return threadIdx.x % kCount; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t ballot(bool yes) const { return __ballot_sync(~0u, yes); }
  [[nodiscard]] PIPESPEC_HD std::uint32_t sum(std::uint32_t n) const {
    return __reduce_add_sync(~0u, n);
  }
  PIPESPEC_HD void sync() const { __syncwarp(); }
  template <typename Work>
  PIPESPEC_HD auto once(const Work& work) const {
    __syncwarp();  // a shuffle orders no memory accesses
    if constexpr (std::is_void_v<decltype(work())>) {
      if (index() == 0) work();
      __syncwarp();
    } else {
      decltype(work()) result{};
      if (index() == 0) result = work();
      __syncwarp();
      return __shfl_sync(~0u, result, 0);
    }
  }
};
#endif

}  // namespace pipespec::cuda
