// What lets one source compile for the host and for the device: the function marker and the few
// atomic accesses the protocol uses. Loads and stores only: read-modify-write on mapped host memory
// or across peers needs hardware support that is not always there, plain aligned accesses of up to
// 8 bytes do not.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda/atomic>
#define PIPESPEC_HD __host__ __device__
#else
#define PIPESPEC_HD
#endif

namespace pipespec {

template <typename T>
PIPESPEC_HD inline T load_relaxed(const T* p) {
#if defined(__CUDA_ARCH__)
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*const_cast<T*>(p))
      .load(::cuda::memory_order_relaxed);
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

template <typename T>
PIPESPEC_HD inline T load_acquire(const T* p) {
#if defined(__CUDA_ARCH__)
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*const_cast<T*>(p))
      .load(::cuda::memory_order_acquire);
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#endif
}

template <typename T>
PIPESPEC_HD inline void store_relaxed(T* p, T value) {
#if defined(__CUDA_ARCH__)
  ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*p).store(value, ::cuda::memory_order_relaxed);
#else
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
#endif
}

template <typename T>
PIPESPEC_HD inline void store_release(T* p, T value) {
#if defined(__CUDA_ARCH__)
  ::cuda::atomic_ref<T, ::cuda::thread_scope_system>(*p).store(value, ::cuda::memory_order_release);
#else
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
#endif
}

}  // namespace pipespec
