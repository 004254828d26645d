#include "fake_cudart.hpp"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Operation = std::function<void()>;

// --- what all calls share ------------------------------------------------------------------------

struct Device {
  std::atomic<cudaError_t> error{cudaSuccess};  // of its context; it stays
  std::atomic<u32> busy{0};                     // streams that are within an operation
};

struct Memory {
  std::size_t bytes;
  cudaMemoryType type;
  int device;
};

struct Injected {
  std::string function;
  u64 n;
  cudaError_t error;
};

struct World {
  std::mutex mutex;  // of what follows, but for the devices and the pauses
  std::map<std::string, u64> calls;
  u64 all_calls = 0;
  std::vector<Injected> injected;
  std::map<const char*, Memory> memory;
  std::vector<std::unique_ptr<CUgraphExec_st>> graphs;  // also those destroyed, to recognise them
  std::vector<std::string> misuses;
  u64 living = 0;
  int devices_found = 0;
  int failed_device = -1;
  Device devices[8];
  std::atomic<u32> pauses_us{0};
  std::atomic<u64> random{0};
};

World& world() {
  static World one;
  return one;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

void misuse(const std::string& what) {
  const std::lock_guard lock(world().mutex);
  world().misuses.push_back(what);
}

// Some operations wait, most do not.
void linger() {
  const u32 max_pause = world().pauses_us.load(std::memory_order_relaxed);
  if (max_pause == 0) return;
  u64 x = world().random.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  if (x % 4 == 0) usleep(static_cast<u32>((x >> 8) % max_pause));
}

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// When a call reports a broken device, nothing runs on the device any more.
cudaError_t broken(int device) {
  Device& of = world().devices[device];
  const cudaError_t error = of.error;
  if (error != cudaSuccess)
    while (of.busy != 0) usleep(20);
  return error;
}

enum class Fails { kAlone, kWithDevice };

// Every call begins with this: whether it fails before it does anything.
cudaError_t enter(const char* function, int device, Fails fails = Fails::kAlone) {
  linger();
  World& w = world();
  {
    const std::lock_guard lock(w.mutex);
    const u64 n = w.calls[function]++, of_all = w.all_calls++;
    for (const Injected& injected : w.injected)
      if (injected.function.empty() ? injected.n == of_all
                                    : injected.function == function && injected.n == n) {
        w.failed_device = device;
        if (fails == Fails::kAlone) return report(injected.error);
        w.devices[device].error = injected.error;
      }
  }
  return report(broken(device));
}

// --- warps ---------------------------------------------------------------------------------------

// The threads of a warp as fibers of one thread of the host. At an operation of the whole warp a
// fiber stores its value and lets the next one run. When the fiber runs again, all fibers have
// stored theirs.
class Warp {
 public:
  static constexpr u32 kLanes = 32;

  Warp() {
    for (Fiber& lane : lanes_) prepare(lane);
  }
  ~Warp() {
    for (Fiber& lane : lanes_) {
#if defined(__SANITIZE_THREAD__)
      __tsan_destroy_fiber(lane.fiber);
#endif
      munmap(lane.stack, kStack);
    }
  }
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  // All threads of a warp, one after the other until each has returned.
  void run(u32 lanes, const Operation& thread) {
    thread_ = &thread;
    n_ = lanes;
    for (u32 lane = 0; lane < lanes; ++lane) lanes_[lane].returned = false;
    for (auto& values : values_) std::fill(std::begin(values), std::end(values), Value{});
    for (auto& words : words_) std::fill(std::begin(words), std::end(words), 0);
#if defined(__SANITIZE_THREAD__)
    host_.fiber = __tsan_get_current_fiber();
#endif
    current_ = this;
    lane_ = 0;
    for (Fiber& lane : lanes_) lane.operations = 0;
    from_host_ = true;
    enter_lane(host_, 0);
    current_ = nullptr;
  }

  static Warp* current() { return current_; }

  const u64* exchange(u32 mask, const char* name, u64 value) {
    const u32 own = lane_;
    Fiber& lane = lanes_[own];
    const u64 number = ++lane.operations;
    Value& left = values_[number % 2][own];
    left = {number, name};
    words_[number % 2][own] = value;
    if (mask != ~0u) misuse(std::string(name) + ": the mask is not that of all threads");
    const u32 next = next_lane(own);
    if (next != own) enter_lane(lane, next);
    for (u32 i = 0; i < n_; ++i)
      if (values_[number % 2][i].number != number ||
          std::strcmp(values_[number % 2][i].name, name) != 0) {
        misuse(std::string(name) + ": the threads of a warp diverge");
        break;
      }
    return words_[number % 2];
  }

 private:
  static constexpr std::size_t kStack = 256 << 10;
  struct Fiber {
    ucontext_t context;
    void* stack = nullptr;
    const void* stack_bottom = nullptr;  // of the host's thread
    std::size_t stack_size = 0;
    void* fiber = nullptr;
    void* fake_stack = nullptr;
    u64 operations = 0;
    bool returned = false;
  };
  struct Value {
    u64 number = 0;
    const char* name = "";
  };

  // A function of its own, because the compiler assumes that getcontext() may return twice.
  [[gnu::noinline]] static void prepare(Fiber& lane) {
    lane.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (lane.stack == MAP_FAILED) throw std::bad_alloc();
    lane.stack_size = kStack;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = kStack;
    makecontext(&lane.context, &Warp::serve, 0);
#if defined(__SANITIZE_THREAD__)
    lane.fiber = __tsan_create_fiber(0);
#endif
  }

  // The next one that has not returned, in turn; `from` itself, if there is no other.
  u32 next_lane(u32 from) const {
    for (u32 i = 1; i < n_; ++i)
      if (!lanes_[(from + i) % n_].returned) return (from + i) % n_;
    return from;
  }

  void enter_lane(Fiber& from, u32 to) {
    lane_ = to;
    threadIdx.x = to;
    change(from, lanes_[to]);
  }

  // Returns when another fiber changes to `from`.
  void change(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(to.fiber, 0);
#elif defined(__SANITIZE_ADDRESS__)
    const bool to_host = &to == &host_;
    __sanitizer_start_switch_fiber(&from.fake_stack, to_host ? host_.stack_bottom : to.stack,
                                   to.stack_size);
#endif
    swapcontext(&from.context, &to.context);
    arrived(from);
  }
  void arrived([[maybe_unused]] Fiber& here) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(here.fake_stack, &bottom, &size);
    if (from_host_) {
      host_.stack_bottom = bottom;
      host_.stack_size = size;
    }
#endif
    from_host_ = false;
  }

  // A fiber's own function: it runs one kernel after the other.
  static void serve() {
    Warp* warp = current_;
    u32 own = warp->lane_;
    warp->arrived(warp->lanes_[own]);
    while (true) {
      (*warp->thread_)();
      own = warp->lane_;
      Fiber& lane = warp->lanes_[own];
      lane.returned = true;
      const u32 next = warp->next_lane(own);
      if (next != own) {
        warp->enter_lane(lane, next);
      } else {
        warp->change(lane, warp->host_);
      }
    }
  }

  static constinit thread_local Warp* current_;
  Fiber lanes_[kLanes];
  Fiber host_;
  const Operation* thread_ = nullptr;
  u32 n_ = 0;
  u32 lane_ = 0;
  bool from_host_ = false;
  Value values_[2][kLanes];
  u64 words_[2][kLanes] = {};
};

constinit thread_local Warp* Warp::current_ = nullptr;

// Their stacks are kept: a kernel takes a warp that no other kernel uses.
class WarpOfThePool {
 public:
  WarpOfThePool() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      warp_ = std::make_unique<Warp>();
    } else {
      warp_ = std::move(free_.back());
      free_.pop_back();
    }
  }
  ~WarpOfThePool() {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(warp_));
  }
  WarpOfThePool(const WarpOfThePool&) = delete;
  WarpOfThePool& operator=(const WarpOfThePool&) = delete;
  Warp* operator->() const { return warp_.get(); }

 private:
  static std::mutex mutex_;
  static std::vector<std::unique_ptr<Warp>> free_;
  std::unique_ptr<Warp> warp_;
};
std::mutex WarpOfThePool::mutex_;
std::vector<std::unique_ptr<Warp>> WarpOfThePool::free_;

// Blocks run one after the other. A block is at most one warp: the runtime has no way for warps to
// wait for each other.
void run_kernel(dim3 blocks, dim3 threads, const Operation& thread) {
  const WarpOfThePool warp;
  gridDim = blocks;
  blockDim = threads;
  for (u32 block = 0; block < blocks.x; ++block) {
    blockIdx.x = block;
    warp->run(threads.x, thread);
  }
}

}  // namespace

// --- streams, events, graphs ---------------------------------------------------------------------

struct CUstream_st {
  explicit CUstream_st(int on) : device(on), thread([this] { serve(); }) {}

  void push(Operation operation) {
    if (captured) {
      captured->push_back(std::move(operation));
      return;
    }
    ++queued;
    {
      const std::lock_guard lock(mutex);
      queue.push_back(std::move(operation));
    }
    changed.notify_one();
  }

  // What is queued runs before it ends, unless the device is broken.
  void close() {
    {
      const std::lock_guard lock(mutex);
      closed = true;
    }
    changed.notify_one();
    thread.join();
  }

  void serve() {
    current_device = device;
    Device& of = world().devices[device];
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closed || !queue.empty(); });
      if (queue.empty()) return;
      const Operation operation = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      linger();
      // Reads the count before the error; broken() uses the opposite order.
      ++of.busy;
      try {
        if (of.error == cudaSuccess) operation();
      } catch (...) {
        of.error = cudaErrorLaunchFailure;
      }
      --of.busy;
      done.fetch_add(1, std::memory_order_release);
      lock.lock();
      ended.notify_all();
    }
  }

  // Without a lock: the answer "not ended yet" makes no promise about memory.
  bool idle() const {
    if (done.load(std::memory_order_relaxed) != queued.load(std::memory_order_relaxed))
      return false;
    return done.load(std::memory_order_acquire) == queued.load(std::memory_order_relaxed);
  }

  const int device;
  std::atomic<u64> queued{0}, done{0};
  std::optional<std::vector<Operation>> captured;
  std::mutex mutex;  // of what follows
  std::condition_variable changed, ended;
  std::deque<Operation> queue;
  bool closed = false;
  std::thread thread;
};

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  u64 done = 0;
};
struct CUevent_st {
  int device;
  std::atomic<u64> recorded{0};
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct CUgraph_st {
  std::vector<Operation> operations;
};
struct CUgraphExec_st {
  std::vector<Operation> operations;
  std::atomic<u64> pending{0};
  std::atomic<bool> destroyed{false};
  std::atomic<int> device{0};  // of its launches
};

namespace {

// Waits until the event's record number n is done, or its device is broken.
cudaError_t await_record(EventState& state, u64 n, int device) {
  std::unique_lock lock(state.mutex);
  while (state.done < n) {
    if (const cudaError_t error = world().devices[device].error; error != cudaSuccess) return error;
    state.changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(1));
  }
  return cudaSuccess;
}

cudaError_t make_stream(cudaStream_t* stream) {
  *stream = new CUstream_st(current_device);
  const std::lock_guard lock(world().mutex);
  ++world().living;
  return cudaSuccess;
}

void forget(u64 n) {
  const std::lock_guard lock(world().mutex);
  world().living -= n;
}

// Memory of 8 bytes or less is written by one access, as a device does.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 4)
    __atomic_store_n(static_cast<u32*>(to),
                     __atomic_load_n(static_cast<const u32*>(from), __ATOMIC_RELAXED),
                     __ATOMIC_RELAXED);
  else
    std::memcpy(to, from, bytes);
}

cudaError_t allocate(void** memory, std::size_t bytes, cudaMemoryType type) {
  const std::size_t size = (bytes + 255) / 256 * 256;
  auto* at = static_cast<char*>(std::aligned_alloc(256, size));
  if (at == nullptr) return report(cudaErrorMemoryAllocation);
  std::memset(at, 0xa5, size);  // callers must not rely on zeros
  *memory = at;
  const std::lock_guard lock(world().mutex);
  world().memory[at] = {bytes, type, current_device};
  return cudaSuccess;
}

// Also of a broken device.
cudaError_t release(const char* function, void* memory) {
  const cudaError_t entered = enter(function, current_device, Fails::kWithDevice);
  if (memory == nullptr) return entered;
  bool known;
  {
    const std::lock_guard lock(world().mutex);
    known = world().memory.erase(static_cast<char*>(memory)) == 1;
  }
  if (!known) {
    misuse("memory is freed that is not allocated");
    return entered != cudaSuccess ? entered : report(cudaErrorInvalidValue);
  }
  std::free(memory);
  return entered;
}

}  // namespace

#define ENTER(...) \
  if (const cudaError_t error = enter(__func__, __VA_ARGS__); error != cudaSuccess) return error

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  static const std::map<cudaError_t, const char*> strings{
      {cudaSuccess, "no error"},
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
      {cudaErrorLaunchFailure, "unspecified launch failure"}};
  const auto found = strings.find(error);
  return found == strings.end() ? "unrecognized error code" : found->second;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  ENTER(current_device);
  *count = world().devices_found;
  return *count > 0 ? cudaSuccess : report(cudaErrorNoDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ENTER(current_device);
  if (device < 0 || device >= world().devices_found) return report(cudaErrorInvalidDevice);
  *properties = {"fake", std::size_t{1} << 30, 9, 0, 1};
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= world().devices_found) return report(cudaErrorInvalidDevice);
  ENTER(device);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  ENTER(current_device);
  if ((flags & cudaHostAllocMapped) == 0) return report(cudaErrorInvalidValue);
  return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* memory) { return release(__func__, memory); }
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  ENTER(current_device);
  return allocate(memory, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void* memory) { return release(__func__, memory); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
  ENTER(current_device);
  *out = {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void*>(address)};
  const auto* at = static_cast<const char*>(address);
  const std::lock_guard lock(world().mutex);
  auto found = world().memory.upper_bound(at);
  if (found == world().memory.begin()) return cudaSuccess;
  --found;
  if (at >= found->first + found->second.bytes) return cudaSuccess;
  out->type = found->second.type;
  out->device = found->second.device;
  out->devicePointer = const_cast<void*>(address);
  if (out->type == cudaMemoryTypeDevice) out->hostPointer = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  ENTER(stream->device);
  stream->push([=] { copy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  ENTER(current_device);
  return make_stream(stream);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  ENTER(current_device);
  return make_stream(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = enter(__func__, stream->device, Fails::kWithDevice);
  // A real runtime would continue with it.
  if (!stream->idle() && world().devices[stream->device].error == cudaSuccess)
    misuse("a stream is destroyed before its work has ended");
  stream->close();
  delete stream;
  forget(1);
  return error;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER(stream->device, Fails::kWithDevice);
  return stream->idle() ? cudaSuccess : report(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER(stream->device, Fails::kWithDevice);
  {
    std::unique_lock lock(stream->mutex);
    stream->ended.wait(lock, [&] { return stream->idle(); });
  }
  return report(broken(stream->device));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER(stream->device);
  stream->push([state = event->state, n = event->recorded.load(), device = event->device] {
    await_record(*state, n, device);
  });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER(stream->device);
  stream->push([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER(current_device);
  *event = new CUevent_st{current_device};
  const std::lock_guard lock(world().mutex);
  ++world().living;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t error = enter(__func__, event->device, Fails::kWithDevice);
  delete event;
  forget(1);
  return error;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER(stream->device);
  if (event->device != stream->device) return report(cudaErrorInvalidResourceHandle);
  stream->push([state = event->state, n = ++event->recorded] {
    const std::lock_guard lock(state->mutex);
    state->done = std::max(state->done, n);
    state->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER(event->device, Fails::kWithDevice);
  const std::shared_ptr<EventState> state = event->state;
  const int device = event->device;
  if (await_record(*state, event->recorded, device) != cudaSuccess) return report(broken(device));
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  ENTER(stream->device);
  stream->captured.emplace();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER(stream->device);
  *graph = new CUgraph_st{std::move(*stream->captured)};
  stream->captured.reset();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  ENTER(current_device);
  auto made = std::make_unique<CUgraphExec_st>();
  made->operations = graph->operations;
  *executable = made.get();
  const std::lock_guard lock(world().mutex);
  world().graphs.push_back(std::move(made));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER(stream->device);
  if (executable->destroyed) {
    misuse("a graph is launched after its end");
    return report(cudaErrorInvalidResourceHandle);
  }
  executable->device = stream->device;
  ++executable->pending;
  stream->push([executable, device = stream->device] {
    struct Ended {
      CUgraphExec_st* of;
      ~Ended() { --of->pending; }
    } const ended{executable};
    for (const Operation& operation : executable->operations) {
      linger();
      if (world().devices[device].error != cudaSuccess) return;
      operation();
    }
  });
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  // Records that a broken device has dropped stay pending.
  if (executable->pending != 0 && world().devices[executable->device].error == cudaSuccess)
    misuse("a graph is destroyed before its last launch has ended");
  executable->destroyed = true;
  return cudaSuccess;
}

std::uint64_t fake_globaltimer() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since + std::chrono::hours(1000))
          .count());
}

namespace fake_cudart {

void reset(int devices, std::uint32_t pauses_us, std::uint64_t seed) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.calls.clear();
  w.all_calls = 0;
  w.injected.clear();
  w.failed_device = -1;
  w.graphs.clear();
  w.misuses.clear();
  w.devices_found = devices;
  for (Device& device : w.devices) device.error = cudaSuccess;
  w.pauses_us = pauses_us;
  w.random = seed;
}

void fail_call(const std::string& function, std::uint64_t n, cudaError_t error) {
  const std::lock_guard lock(world().mutex);
  world().injected.push_back({function, n, error});
}

std::uint64_t calls(const std::string& function) {
  const std::lock_guard lock(world().mutex);
  return function.empty() ? world().all_calls : world().calls[function];
}

void break_device(int device, cudaError_t error) { world().devices[device].error = error; }

int failed_device() {
  const std::lock_guard lock(world().mutex);
  return world().failed_device;
}

bool is_broken() {
  return std::any_of(std::begin(world().devices), std::end(world().devices),
                     [](const Device& device) { return device.error != cudaSuccess; });
}

void heal() {
  const std::lock_guard lock(world().mutex);
  world().injected.clear();
  for (Device& device : world().devices) device.error = cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> kernel) {
  stream->push(std::move(kernel));
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  const cudaError_t error = enter("cudaLaunchKernelEx", config.stream->device);
  if (error != cudaSuccess) return error;
  const dim3 blocks = config.gridDim, threads = config.blockDim;
  if (blocks.x < 1 || threads.x < 1 || threads.x > Warp::kLanes)
    return report(cudaErrorInvalidValue);
  config.stream->push(
      [blocks, threads, thread = std::move(thread)] { run_kernel(blocks, threads, thread); });
  return cudaSuccess;
}

const std::uint64_t* exchange(unsigned mask, const char* name, std::uint64_t value) {
  return Warp::current()->exchange(mask, name, value);
}

std::vector<std::string> misuses() {
  const std::lock_guard lock(world().mutex);
  return world().misuses;
}

std::uint64_t living() {
  const std::lock_guard lock(world().mutex);
  return world().living;
}

}  // namespace fake_cudart
