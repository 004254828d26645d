// The launcher of GPUs: a step is a captured graph on the stage's own stream. The scheduler's
// thread queues it and goes to sleep. One thread per stage sleeps until the step's event, then
// rings the scheduler's bell.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/protocol_kernels.hpp"
#include "runtime/launcher.hpp"

namespace pipespec::cuda {

// A stage's graphs, one per width: open_step, plan, the forward, the selection, commit, close_step.
// Handles and pointers as integers, as they come from Python; all of it outlives the launcher. The
// steps of a stage without widths are part of another stage's graphs, so the stage needs none of
// this.
struct StageGraphs {
  int device = 0;
  int priority = 0;  // of its stream: lower numbers go first
  std::vector<std::uint32_t> widths;
  std::vector<std::uintptr_t> graphs;  // cudaGraphExec_t, one per width
  std::uintptr_t block = 0;            // that its kernels use; the same for all stages
  std::uintptr_t policies = 0;         // StepPolicy[StepLog::kRecords] in pinned memory, for plan()
  std::uintptr_t scratch = 0;          // StepScratch in memory of the device
  std::uintptr_t log = 0;              // StepLog in pinned and mapped memory
};

// A stage has one stream and no other: a device has few queues for streams, 8 unless
// CUDA_DEVICE_MAX_CONNECTIONS says more, and a stream that waits for an event holds up the stages
// that share its queue. So one thread per stage waits on the host for the end of a step, in
// cudaEventSynchronize() with cudaEventBlockingSync. No stage waits for the notice of a slower one.
// A callback on the stage's own stream would delay its next step, and polling means either a delay
// or a busy wait. If a notice does not come, the scheduler calls ended() after patrol_ns().
//
// Stages may lie on several devices. Their kernels then work on the host shadow itself, in pinned
// memory that all devices map: system-scope loads and stores, no peer access, no event between
// devices. A device that is broken is the failure of its stages alone.
class CudaLauncher final : public Launcher {
 public:
  // `host shadow`: the host's block, in pinned and mapped memory; the caller resets it before a
  // generation, and begin() copies it to the block that the stages use, if that is another one (in
  // the memory of the device that they are all on). Throws std::runtime_error without a usable
  // device, std::invalid_argument on arguments that do not fit together.
  CudaLauncher(std::uintptr_t shadow, std::vector<StageGraphs> stages);
  ~CudaLauncher() override;
  CudaLauncher(const CudaLauncher&) = delete;
  CudaLauncher& operator=(const CudaLauncher&) = delete;

  Block shadow() const override { return shadow_; }
  const std::vector<std::uint32_t>& widths(std::uint32_t stage) const override;
  std::uint32_t depth() const override { return StepLog::kRecords; }
  std::int64_t patrol_ns() const override { return 20'000'000; }
  void begin(Notice notice) override;
  void end() override;
  void leave() override;
  void settle() override;
  // Leaves the thread, which is one of the scheduler's, on the stage's device.
  void launch(std::uint32_t stage, const StepPolicy& policy) override;
  std::uint64_t ended(std::uint32_t stage) override;
  Outcome outcome(std::uint32_t stage, std::uint64_t n) const override;
  void set_alive(std::uint32_t stage, bool alive) override;
  void set_limit(std::uint32_t row, std::uint32_t limit) override;

  // Since construction: steps launched, and the number of times that the host has waited for a
  // device. Only begin(), end() and settle() wait, the same number of times whatever the number of
  // steps.
  std::uint64_t launches() const { return launches_; }
  std::uint64_t host_syncs() const { return host_syncs_; }

 private:
  struct Lane;

  // The stages that have steps of their own.
  std::vector<Lane*> launched() const;
  // The only place where the host waits for a device.
  cudaError_t await(cudaStream_t stream);
  void set_clock(Lane& lane);

  Block shadow_;
  std::uintptr_t block_ = 0;  // of all stages
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<std::uint64_t> launches_{0};
  std::atomic<std::uint64_t> host_syncs_{0};
};

}  // namespace pipespec::cuda
