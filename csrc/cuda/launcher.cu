#include <cuda_runtime.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/device.hpp"
#include "cuda/launcher.hpp"
#include "runtime/clock.hpp"
#include "runtime/doorbell.hpp"
#include "runtime/generation.hpp"

namespace pipespec::cuda {
namespace {

// Every device can use it, at the host's address.
constexpr unsigned kPinned = cudaHostAllocPortable | cudaHostAllocMapped;
constexpr int kClockReadings = 4;
constexpr std::int64_t kNap = 1'000'000'000;  // only a safety limit: no bell is lost

// Runs `work` in a thread of its own, so that the caller's thread keeps its current device. Setting
// the device back would not do: cudaSetDevice() makes a context on a device that the caller may
// never have used.
template <class Work>
void on_device(int device, const Work& work) {
  std::async(std::launch::async, [&] {
    check(cudaSetDevice(device), "CUDA device");
    work();
  }).get();
}

// Kernels and copies were captured with these addresses: they must mean the same on the current
// device. Throws std::invalid_argument.
void require_pinned(std::uintptr_t address, const std::string& what) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address)), "memory");
  if (found.type != cudaMemoryTypeHost ||
      found.devicePointer != reinterpret_cast<const void*>(address))
    throw std::invalid_argument(what +
                                " must be in pinned memory of the host, mapped for all devices");
}
void require_on(int device, std::uintptr_t address, const std::string& what) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address)), "memory");
  if (found.type != cudaMemoryTypeDevice || found.device != device)
    throw std::invalid_argument(what + " must be in the memory of device " +
                                std::to_string(device));
}

}  // namespace

struct CudaLauncher::Lane {
  StageGraphs graphs;
  std::uint32_t stage = 0;
  std::string name;  // in errors
  cudaStream_t stream = nullptr;
  cudaEvent_t ends[StepLog::kRecords] = {};  // of the steps in flight
  std::uint64_t* clock = nullptr;            // pinned
  std::int64_t clock_offset_ns = 0;          // the host's clock minus %globaltimer
  std::uint64_t launched = 0;                // since begin()
  std::uint64_t base = 0;                    // steps that had ended before
  std::string broken;                        // why begin() failed; empty: no failure
  std::mutex mutex;                          // guards `notice`; held during its call
  Notice notice;
  std::atomic<std::uint64_t> recorded{0};  // steps that the waiter reports, all together
  std::atomic<std::uint64_t> reported{0};
  std::atomic<bool> closed{false};
  Doorbell queued, idle;
  std::thread waiter;
  const pid_t process = getpid();

  Lane(StageGraphs of, std::uint32_t number, std::string called)
      : graphs(std::move(of)), stage(number), name(std::move(called)) {}
  ~Lane() {
    if (!owned()) {
      static_cast<void>(new std::thread(std::move(waiter)));
      return;
    }
    closed = true;
    queued.ring();
    if (waiter.joinable()) waiter.join();
    if (stream != nullptr) cudaStreamDestroy(stream);
    for (cudaEvent_t end : ends)
      if (end != nullptr) cudaEventDestroy(end);
    if (clock != nullptr) cudaFreeHost(clock);
    cudaGetLastError();  // clears the error: a destructor cannot report it
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // False in a fork: the thread is the parent's, and CUDA does not work there.
  bool owned() const { return process == getpid(); }

  // On its device.
  void open(std::uintptr_t shadow) {
    require_pinned(shadow, name + ": the host shadow");
    require_pinned(graphs.log, name + ": its log");
    require_pinned(graphs.policies, name + ": its policies");
    if (graphs.block != shadow) require_on(graphs.device, graphs.block, name + ": its block");
    require_on(graphs.device, graphs.scratch, name + ": its scratch");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, graphs.priority),
          "stream of a stage");
    for (cudaEvent_t& end : ends)
      check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync),
            "event of a stage");
    check(cudaHostAlloc(reinterpret_cast<void**>(&clock), sizeof *clock, kPinned), "pinned memory");
    waiter = std::thread([this] { report_ends(); });
  }

  // The waiter: calls `notice` after the end or failure of every step, until the lane is closed.
  void report_ends() {
    cudaSetDevice(graphs.device);
    // Another thread's capture in global mode would forbid this thread's calls.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    while (true) {
      const std::uint32_t heard = queued.note();
      if (closed) return;
      if (reported == recorded) {
        queued.sleep(heard, kNap);
        continue;
      }
      // ended() reports a failure.
      cudaEventSynchronize(ends[reported % StepLog::kRecords]);
      const std::lock_guard lock(mutex);
      if (notice) notice(stage);
      ++reported;
      idle.ring();
    }
  }

  // Waits until every notice has been given. No more come before the next launch.
  void settle() {
    while (true) {
      const std::uint32_t heard = idle.note();
      if (reported == recorded) break;
      idle.sleep(heard, kNap);
    }
    silence();
  }

  // No notice is under way when it returns.
  void silence() {
    const std::lock_guard lock(mutex);
    notice = nullptr;
  }

  const StepLog& log() const { return *reinterpret_cast<const StepLog*>(graphs.log); }
};

CudaLauncher::CudaLauncher(std::uintptr_t shadow, std::vector<StageGraphs> stages) {
  const int devices_found = static_cast<int>(devices().size());
  shadow_ = attach(reinterpret_cast<void*>(shadow));
  if (stages.size() != shadow_.stages())
    throw std::invalid_argument("the block has " + std::to_string(shadow_.stages()) +
                                " stages, but there are graphs of " +
                                std::to_string(stages.size()));
  int device = -1;  // of the stages before
  for (const StageGraphs& stage : stages) {
    if (stage.widths.empty() && stage.graphs.empty()) continue;
    if (stage.device < 0 || stage.device >= devices_found)
      throw std::invalid_argument("there is no CUDA device " + std::to_string(stage.device));
    if (stage.widths.empty() || stage.widths.size() != stage.graphs.size() ||
        stage.widths.front() < 1 ||
        std::adjacent_find(stage.widths.begin(), stage.widths.end(), std::greater_equal<>()) !=
            stage.widths.end())
      throw std::invalid_argument("widths must be positive and ascending, with one graph for each");
    if (stage.block == 0 || stage.policies == 0 || stage.scratch == 0 || stage.log == 0)
      throw std::invalid_argument("a stage needs a block, policies, a scratch and a log");
    if (device >= 0 && stage.block != block_)
      throw std::invalid_argument("all stages must use one block: they meet nowhere else");
    if (device >= 0 && stage.device != device && stage.block != shadow)
      throw std::invalid_argument(
          "stages on several devices must use the host shadow itself as their block, in pinned "
          "memory");
    block_ = stage.block;
    device = stage.device;
  }
  for (StageGraphs& stage : stages) {
    const auto number = static_cast<std::uint32_t>(lanes_.size());
    const std::string name =
        number == shadow_.target() ? "target" : "draft " + std::to_string(number);
    lanes_.push_back(std::make_unique<Lane>(std::move(stage), number, name));
  }
  for (Lane* lane : launched()) on_device(lane->graphs.device, [&] { lane->open(shadow); });
}

CudaLauncher::~CudaLauncher() {
  // ended() has reported the errors, and a destructor cannot.
  for (const Lane* lane : launched())
    if (lane->owned()) await(lane->stream);
}

std::vector<CudaLauncher::Lane*> CudaLauncher::launched() const {
  std::vector<Lane*> found;
  for (const auto& lane : lanes_)
    if (!lane->graphs.widths.empty()) found.push_back(lane.get());
  return found;
}

cudaError_t CudaLauncher::await(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;  // it could not be made
  ++host_syncs_;
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

const std::vector<std::uint32_t>& CudaLauncher::widths(std::uint32_t stage) const {
  return lanes_[stage]->graphs.widths;
}

void CudaLauncher::begin(Notice notice) {
  bool copied = block_ == reinterpret_cast<std::uintptr_t>(&shadow_.header());
  for (Lane* lane : launched()) {
    lane->launched = 0;
    lane->broken.clear();
    {
      const std::lock_guard lock(lane->mutex);
      lane->notice = notice;
    }
    try {
      on_device(lane->graphs.device, [&] {
        check(await(lane->stream), "the steps that were left");
        lane->base = load_acquire(&lane->log().ended);
        if (!copied)
          check(cudaMemcpyAsync(reinterpret_cast<void*>(block_), &shadow_.header(),
                                shadow_.header().bytes, cudaMemcpyHostToDevice, lane->stream),
                "copying the state block");
        const StepScratch scratch{lane->base, 0, 0, 0, 0};
        check(cudaMemcpyAsync(reinterpret_cast<void*>(lane->graphs.scratch), &scratch,
                              sizeof scratch, cudaMemcpyHostToDevice, lane->stream),
              "preparing a stage");
        check(await(lane->stream), "preparing a stage");
        copied = true;
        set_clock(*lane);
      });
    } catch (const std::exception& error) {
      lane->broken = error.what();  // the other stages begin anyway
    }
  }
}

// From the shortest of several readings, so its error is half of a launch's time, some
// microseconds. Repeated for each generation, because the two clocks drift apart.
void CudaLauncher::set_clock(Lane& lane) {
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < kClockReadings; ++i) {
    const std::int64_t before = now_ns();
    check(read_clock(lane.clock, reinterpret_cast<std::uintptr_t>(lane.stream)),
          "reading the device's clock");
    check(await(lane.stream), "reading the device's clock");
    const std::int64_t took = now_ns() - before;
    if (took >= best) continue;
    best = took;
    lane.clock_offset_ns = before + took / 2 - static_cast<std::int64_t>(*lane.clock);
  }
}

void CudaLauncher::end() {
  for (Lane* lane : launched()) {
    await(lane->stream);  // ended() has reported its error
    lane->settle();
  }
}

void CudaLauncher::leave() {
  for (Lane* lane : launched()) lane->silence();
}

void CudaLauncher::settle() {
  for (const Lane* lane : launched())
    if (lane->owned()) await(lane->stream);  // begin() reports an error
}

void CudaLauncher::launch(std::uint32_t stage, const StepPolicy& policy) {
  Lane& lane = *lanes_[stage];
  if (!lane.broken.empty()) throw std::runtime_error(lane.broken);
  const std::vector<std::uint32_t>& widths = lane.graphs.widths;
  const auto at = std::lower_bound(widths.begin(), widths.end(), policy.width);
  if (at == widths.end() || *at != policy.width)
    throw std::invalid_argument("no graph of width " + std::to_string(policy.width));
  const auto graph = reinterpret_cast<cudaGraphExec_t>(
      lane.graphs.graphs[static_cast<std::size_t>(at - widths.begin())]);
  check(cudaSetDevice(lane.graphs.device), "CUDA device");
  // The step that used this place before has ended: at most kRecords are in flight.
  auto* policies = reinterpret_cast<StepPolicy*>(lane.graphs.policies);
  policies[(lane.base + lane.launched) % StepLog::kRecords] = policy;
  check(cudaGraphLaunch(graph, lane.stream), "launching a step");
  ++lane.launched;
  ++launches_;
  // The step runs already, so its launch has not failed. Without an event, wait for it here.
  if (cudaEventRecord(lane.ends[lane.recorded % StepLog::kRecords], lane.stream) != cudaSuccess)
    await(lane.stream);
  ++lane.recorded;
  lane.queued.ring();
}

std::uint64_t CudaLauncher::ended(std::uint32_t stage) {
  const Lane& lane = *lanes_[stage];
  const cudaError_t state = cudaStreamQuery(lane.stream);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
  } else {
    check(state, "a step");
  }
  return load_acquire(&lane.log().ended) - lane.base;
}

Outcome CudaLauncher::outcome(std::uint32_t stage, std::uint64_t n) const {
  const Lane& lane = *lanes_[stage];
  const StepLog::Record& record = lane.log().records[(lane.base + n) % StepLog::kRecords];
  return {static_cast<std::int64_t>(record.start_ns) + lane.clock_offset_ns,
          static_cast<std::int64_t>(record.end_ns) + lane.clock_offset_ns,
          record.fed,
          record.draft_tokens,
          record.accepted,
          record.rolled_back,
          record.rollbacks};
}

// Only a plan with min_draft_tokens reads it, and none is launched: the host shadow alone has it.
void CudaLauncher::set_alive(std::uint32_t stage, bool alive) {
  store_release(&shadow_.control(stage).alive, alive ? 1u : 0u);
}

// In the host shadow, and at the same offset in the block if that is another one.
void CudaLauncher::set_limit(std::uint32_t row, std::uint32_t limit) {
  std::uint32_t* word = &shadow_.span(row).limit;
  store_release(word, limit);
  const char* shadow = reinterpret_cast<const char*>(&shadow_.header());
  char* block = reinterpret_cast<char*>(block_);
  if (block == shadow) return;
  // The copy reads the pinned host shadow, so nothing waits. A value that the host writes meanwhile
  // is as good as the old one. The target's stream runs the copy after its steps in flight.
  check(cudaMemcpyAsync(block + (reinterpret_cast<const char*>(word) - shadow), word, sizeof limit,
                        cudaMemcpyHostToDevice, lanes_.back()->stream),
        "ending a row");
}

}  // namespace pipespec::cuda
