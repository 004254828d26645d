// One source for host and device: the function marker and the few atomic accesses that the protocol
// uses. Loads and stores only: read-modify-write on mapped host memory or across peers needs
// hardware support that some machines lack. Plain aligned accesses of up to 8 bytes work
// everywhere.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda/atomic>
#define PIPESPEC_HD __host__ __device__
#else
#define PIPESPEC_HD
#endif

namespace pipespec {

// Who else uses a word while it is accessed. Threads of the host ignore it.
enum class Scope : std::uint8_t {
  kSystem,  // the host, or another device
  kDevice,  // only kernels of one device, in whose memory the word lies
};

enum class Order : int {
  kRelaxed = __ATOMIC_RELAXED,
  kAcquire = __ATOMIC_ACQUIRE,
  kRelease = __ATOMIC_RELEASE,
};

}  // namespace pipespec

#if defined(PIPESPEC_MEMORY)
#include PIPESPEC_MEMORY  // a test's memory: it gives every answer that the orders allow
#else
namespace pipespec::memory {

#if defined(__CUDA_ARCH__)
template <typename T>
using ForDevice = ::cuda::atomic_ref<T, ::cuda::thread_scope_device>;
template <typename T>
using ForSystem = ::cuda::atomic_ref<T, ::cuda::thread_scope_system>;
template <Order order>
inline constexpr auto kOrder = order == Order::kAcquire   ? ::cuda::memory_order_acquire
                               : order == Order::kRelease ? ::cuda::memory_order_release
                                                          : ::cuda::memory_order_relaxed;
#endif

template <Order order, typename T>
PIPESPEC_HD inline T load(const T* p, [[maybe_unused]] Scope scope) {
#if defined(__CUDA_ARCH__)
  T& word = *const_cast<T*>(p);
  return scope == Scope::kDevice ? ForDevice<T>(word).load(kOrder<order>)
                                 : ForSystem<T>(word).load(kOrder<order>);
#else
  return __atomic_load_n(p, static_cast<int>(order));
#endif
}

template <Order order, typename T>
PIPESPEC_HD inline void store(T* p, T value, [[maybe_unused]] Scope scope) {
#if defined(__CUDA_ARCH__)
  if (scope == Scope::kDevice) {
    ForDevice<T>(*p).store(value, kOrder<order>);
  } else {
    ForSystem<T>(*p).store(value, kOrder<order>);
  }
#else
  __atomic_store_n(p, value, static_cast<int>(order));
#endif
}

// ThreadSanitizer does not know fences. It needs none here: whatever a fence orders is atomic.
#if defined(__SANITIZE_THREAD__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
template <Order order>
PIPESPEC_HD inline void fence([[maybe_unused]] Scope scope) {
#if defined(__CUDA_ARCH__)
  if (scope == Scope::kDevice) {
    ::cuda::atomic_thread_fence(kOrder<order>, ::cuda::thread_scope_device);
  } else {
    ::cuda::atomic_thread_fence(kOrder<order>, ::cuda::thread_scope_system);
  }
#else
  __atomic_thread_fence(static_cast<int>(order));
#endif
}
#if defined(__SANITIZE_THREAD__)
#pragma GCC diagnostic pop
#endif

}  // namespace pipespec::memory
#endif

namespace pipespec {

template <typename T>
PIPESPEC_HD inline T load_relaxed(const T* p, Scope scope = Scope::kSystem) {
  return memory::load<Order::kRelaxed>(p, scope);
}

template <typename T>
PIPESPEC_HD inline T load_acquire(const T* p, Scope scope = Scope::kSystem) {
  return memory::load<Order::kAcquire>(p, scope);
}

template <typename T>
PIPESPEC_HD inline void store_relaxed(T* p, T value, Scope scope = Scope::kSystem) {
  memory::store<Order::kRelaxed>(p, value, scope);
}

template <typename T>
PIPESPEC_HD inline void store_release(T* p, T value, Scope scope = Scope::kSystem) {
  memory::store<Order::kRelease>(p, value, scope);
}

// A load before the fence gets no older value than a load after it.
PIPESPEC_HD inline void fence_acquire(Scope scope) { memory::fence<Order::kAcquire>(scope); }
// A thread that sees a store after the fence also sees, after an acquire, the stores before it.
PIPESPEC_HD inline void fence_release(Scope scope) { memory::fence<Order::kRelease>(scope); }

}  // namespace pipespec
