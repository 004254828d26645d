// The launcher of GPUs: a step is a captured graph on the stage's own stream. The scheduler's
// thread queues it and goes to sleep; nothing waits for the device but a callback that rings its
// bell.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/protocol_kernels.hpp"
#include "runtime/launcher.hpp"

namespace pipespec::cuda {

// A stage's graphs, one per width: open_step, plan, the forward, the selection, commit, close_step.
// Handles and pointers as integers, as they come from Python; all of it outlives the launcher.
struct StageGraphs {
  int device = 0;
  int priority = 0;  // of its stream: lower numbers go first
  std::vector<std::uint32_t> widths;
  std::vector<std::uintptr_t> graphs;  // cudaGraphExec_t, one per width
  std::uintptr_t block = 0;            // that its kernels use; may be the mirror
  std::uintptr_t policy = 0;           // Policy in memory of the device, which plan() reads
  std::uintptr_t scratch = 0;          // StepScratch in memory of the device
  std::uintptr_t log = 0;              // StepLog in pinned and mapped memory
};

// Completion is told by cudaLaunchHostFunc() on a second stream that waits for the first one's
// event. On the stage's own stream the callback would hold up the step behind it; to poll events
// would need a period, which is either a delay or a busy wait. Where a callback does not come (the
// context is broken), the scheduler looks after patrol_ns() and finds the error.
class CudaLauncher final : public Launcher {
 public:
  // `mirror`: the host's block, in pinned and mapped memory; the caller resets it before a
  // generation, and begin() copies it to the blocks that the stages use. Throws std::runtime_error
  // without a usable device, std::invalid_argument on arguments that do not fit together.
  CudaLauncher(std::uintptr_t mirror, std::vector<StageGraphs> stages);
  ~CudaLauncher() override;
  CudaLauncher(const CudaLauncher&) = delete;
  CudaLauncher& operator=(const CudaLauncher&) = delete;

  Block mirror() const override { return mirror_; }
  const std::vector<std::uint32_t>& widths(std::uint32_t stage) const override;
  std::uint32_t depth() const override { return StepLog::kRecords; }
  std::int64_t patrol_ns() const override { return 20'000'000; }
  void begin(Notice notice) override;
  void end() override;
  void launch(std::uint32_t stage, const Policy& policy) override;
  std::uint64_t ended(std::uint32_t stage) override;
  Outcome outcome(std::uint32_t stage, std::uint64_t n) const override;
  void set_alive(std::uint32_t stage, bool alive) override;
  void set_limit(std::uint32_t row, std::uint32_t limit) override;

 private:
  struct Lane;

  Block mirror_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace pipespec::cuda
