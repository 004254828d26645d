#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/device.hpp"
#include "cuda/launcher.hpp"
#include "runtime/clock.hpp"
#include "runtime/generation.hpp"

namespace pipespec::cuda {
namespace {

// The thread that calls us may have another device.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "current CUDA device");
    if (device != before_) check(cudaSetDevice(device), "CUDA device");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// What to add to %globaltimer to get the host's clock: from the shortest of several readings, so to
// half of a launch's time, some microseconds.
std::int64_t clock_offset(cudaStream_t stream) {
  std::uint64_t* device_ns = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&device_ns), sizeof *device_ns, cudaHostAllocMapped),
        "pinned memory");
  std::int64_t best = std::numeric_limits<std::int64_t>::max(), offset = 0;
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < 16 && error == cudaSuccess; ++i) {
    const std::int64_t before = now_ns();
    error = read_clock(device_ns, reinterpret_cast<std::uintptr_t>(stream));
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    const std::int64_t took = now_ns() - before;
    if (took >= best) continue;
    best = took;
    offset = before + took / 2 - static_cast<std::int64_t>(*device_ns);
  }
  cudaFreeHost(device_ns);
  check(error, "reading the device's clock");
  return offset;
}

}  // namespace

struct CudaLauncher::Lane {
  StageGraphs graphs;
  std::uint32_t stage = 0;
  cudaStream_t stream = nullptr;
  cudaStream_t notices = nullptr;  // behind `stream`, for the callbacks
  cudaStream_t words = nullptr;    // beside both, for the caller's words
  cudaEvent_t event = nullptr;
  Policy* policies = nullptr;  // pinned, one per step in flight
  std::int64_t clock_offset_ns = 0;
  std::uint64_t launched = 0;  // since begin()
  std::uint64_t base = 0;      // steps that had ended before
  Notice notice;

  explicit Lane(StageGraphs of, std::uint32_t number) : graphs(std::move(of)), stage(number) {
    try {
      open();
    } catch (...) {
      close();
      throw;
    }
  }
  ~Lane() { close(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void open() {
    const OnDevice on(graphs.device);
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, graphs.priority),
          "stream of a stage");
    check(cudaStreamCreateWithFlags(&notices, cudaStreamNonBlocking), "stream of notices");
    check(cudaStreamCreateWithFlags(&words, cudaStreamNonBlocking), "stream of words");
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event of a stage");
    check(cudaHostAlloc(reinterpret_cast<void**>(&policies), StepLog::kRecords * sizeof(Policy),
                        cudaHostAllocDefault),
          "pinned memory");
    clock_offset_ns = clock_offset(stream);
  }
  void close() {
    for (cudaStream_t s : {stream, notices, words})
      if (s != nullptr) cudaStreamDestroy(s);
    if (event != nullptr) cudaEventDestroy(event);
    if (policies != nullptr) cudaFreeHost(policies);
  }

  const StepLog& log() const { return *reinterpret_cast<const StepLog*>(graphs.log); }
};

CudaLauncher::CudaLauncher(std::uintptr_t mirror, std::vector<StageGraphs> stages) {
  const int devices_found = static_cast<int>(devices().size());
  mirror_ = attach(reinterpret_cast<void*>(mirror));
  if (stages.size() != mirror_.stages())
    throw std::invalid_argument("the block has " + std::to_string(mirror_.stages()) +
                                " stages, but there are graphs of " +
                                std::to_string(stages.size()));
  for (const StageGraphs& stage : stages) {
    if (stage.device < 0 || stage.device >= devices_found)
      throw std::invalid_argument("there is no CUDA device " + std::to_string(stage.device));
    if (stage.widths.empty() || stage.widths.size() != stage.graphs.size() ||
        stage.widths.front() < 1 ||
        std::adjacent_find(stage.widths.begin(), stage.widths.end(), std::greater_equal<>()) !=
            stage.widths.end())
      throw std::invalid_argument("widths must be positive and ascending, with one graph for each");
    if (stage.block == 0 || stage.policy == 0 || stage.scratch == 0 || stage.log == 0)
      throw std::invalid_argument("a stage needs a block, a policy, a scratch and a log");
  }
  for (StageGraphs& stage : stages)
    lanes_.push_back(
        std::make_unique<Lane>(std::move(stage), static_cast<std::uint32_t>(lanes_.size())));
}

CudaLauncher::~CudaLauncher() {
  // Errors have been told by ended(), and there is nobody left to tell.
  for (const auto& lane : lanes_)
    for (cudaStream_t stream : {lane->stream, lane->notices, lane->words})
      cudaStreamSynchronize(stream);
}

const std::vector<std::uint32_t>& CudaLauncher::widths(std::uint32_t stage) const {
  return lanes_[stage]->graphs.widths;
}

void CudaLauncher::begin(Notice notice) {
  const std::uintptr_t mirror = reinterpret_cast<std::uintptr_t>(&mirror_.header());
  for (const auto& lane : lanes_) {
    const StageGraphs& graphs = lane->graphs;
    const OnDevice on(graphs.device);
    if (graphs.block != mirror)
      check(cudaMemcpyAsync(reinterpret_cast<void*>(graphs.block),
                            reinterpret_cast<const void*>(mirror), mirror_.header().bytes,
                            cudaMemcpyHostToDevice, lane->stream),
            "copying the state block");
    const StepScratch scratch{load_acquire(&lane->log().ended), 0, 0, 0};
    check(cudaMemcpyAsync(reinterpret_cast<void*>(graphs.scratch), &scratch, sizeof scratch,
                          cudaMemcpyHostToDevice, lane->stream),
          "preparing a stage");
    check(cudaStreamSynchronize(lane->stream), "preparing a stage");
    lane->base = scratch.ended;
    lane->launched = 0;
    lane->notice = notice;
  }
}

void CudaLauncher::end() {
  for (const auto& lane : lanes_) {
    // A broken context is no news here: ended() has told, and its callbacks do not come.
    for (cudaStream_t stream : {lane->stream, lane->notices, lane->words})
      if (cudaStreamSynchronize(stream) != cudaSuccess) cudaGetLastError();
    lane->notice = nullptr;
  }
}

void CudaLauncher::launch(std::uint32_t stage, const Policy& policy) {
  Lane& lane = *lanes_[stage];
  const std::vector<std::uint32_t>& widths = lane.graphs.widths;
  const auto at = std::lower_bound(widths.begin(), widths.end(), policy.width);
  if (at == widths.end() || *at != policy.width)
    throw std::invalid_argument("no graph of width " + std::to_string(policy.width));
  const auto graph = reinterpret_cast<cudaGraphExec_t>(
      lane.graphs.graphs[static_cast<std::size_t>(at - widths.begin())]);
  const OnDevice on(lane.graphs.device);
  Policy& pinned = lane.policies[lane.launched % StepLog::kRecords];
  pinned = policy;
  check(cudaMemcpyAsync(reinterpret_cast<void*>(lane.graphs.policy), &pinned, sizeof pinned,
                        cudaMemcpyHostToDevice, lane.stream),
        "copying a step's policy");
  check(cudaGraphLaunch(graph, lane.stream), "launching a step");
  ++lane.launched;
  check(cudaEventRecord(lane.event, lane.stream), "recording a step's end");
  check(cudaStreamWaitEvent(lane.notices, lane.event, 0), "waiting for a step's end");
  check(cudaLaunchHostFunc(
            lane.notices,
            [](void* data) {
              const Lane& own = *static_cast<const Lane*>(data);
              own.notice(own.stage);
            },
            &lane),
        "queueing the notice of a step's end");
}

std::uint64_t CudaLauncher::ended(std::uint32_t stage) {
  Lane& lane = *lanes_[stage];
  const OnDevice on(lane.graphs.device);
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
          record.hints,
          record.accepted,
          record.taken_back};
}

// Only waits look at it, and those are the host's: steps are launched with min_hints 0.
void CudaLauncher::set_alive(std::uint32_t stage, bool alive) {
  store_release(&mirror_.control(stage).alive, alive ? 1u : 0u);
}

// In the mirror and, at the same offset, in every block that is another one.
void CudaLauncher::set_limit(std::uint32_t row, std::uint32_t limit) {
  std::uint32_t* word = &mirror_.span(row).limit;
  store_release(word, limit);
  const char* mirror = reinterpret_cast<const char*>(&mirror_.header());
  const std::ptrdiff_t offset = reinterpret_cast<const char*>(word) - mirror;
  for (const auto& lane : lanes_) {
    char* block = reinterpret_cast<char*>(lane->graphs.block);
    if (block == mirror) continue;
    const OnDevice on(lane->graphs.device);
    // From pageable memory: the value has been read when this returns.
    check(
        cudaMemcpyAsync(block + offset, &limit, sizeof limit, cudaMemcpyHostToDevice, lane->words),
        "ending a row");
  }
}

}  // namespace pipespec::cuda
