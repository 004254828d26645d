// The scheduler over the launcher of CUDA graphs, with its kernels, on a CUDA runtime without a GPU
// (fake_cudart/). To be run under ThreadSanitizer as well.
#include <sys/wait.h>

#include <memory>

#include "chains.hpp"
#include "cuda/launch.hpp"
#include "cuda/launcher.hpp"
#include "cuda/protocol_kernels.hpp"
#include "fake_cudart/fake_cudart.hpp"

using namespace pipespec;
using namespace chains;
using check::trials;
using cuda::CudaLauncher;
using cuda::StepLog;
using cuda::StepScratch;

namespace {

void must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Memory of the current device, or pinned.
class Allocations {
 public:
  Allocations() = default;
  ~Allocations() {
    for (void* memory : device_) cudaFree(memory);
    for (void* memory : pinned_) cudaFreeHost(memory);
  }
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;

  template <class T>
  T* on_device(std::size_t n) {
    void* memory = nullptr;
    must(cudaMalloc(&memory, n * sizeof(T)));
    device_.push_back(memory);
    return static_cast<T*>(memory);
  }
  template <class T>
  T* pinned(std::size_t n) {
    void* memory = nullptr;
    must(cudaHostAlloc(&memory, n * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped));
    pinned_.push_back(memory);
    return static_cast<T*>(memory);
  }

 private:
  std::vector<void*> device_, pinned_;
};

// A runtime, a block and its copy. Constructed before the models.
class Runtime {
 protected:
  // The longest pause, in microseconds, in calls and before operations.
  static constexpr u32 kPauses[] = {0, 5, 30};

  Runtime(const Task& task, bool on_one_device) {
    const auto stages = static_cast<u32>(task.models.size());
    const auto rows = static_cast<u32>(task.prompts.size());
    fake_cudart::reset(on_one_device ? 1 : static_cast<int>(stages), kPauses[task.seed % 3],
                       task.seed);
    must(cudaSetDevice(0));
    const std::size_t bytes = Block::bytes(stages, rows, 256);
    char* home = memory_.pinned<char>(bytes);
    std::memset(home, 0, bytes);
    home_ = Block::create(home, stages, rows, 256);
    if (on_one_device) {
      char* copy = memory_.on_device<char>(bytes);
      std::memcpy(copy, home, bytes);
      block_ = Block(copy);
    } else {
      block_ = home_;
    }
  }

  Allocations memory_;
  Block home_, block_;
};

// `shadowed`: all stages are on one device, with the block in its memory. Else each is on its own,
// and they share pinned memory.
class Chain : Runtime, public Models {
 public:
  static constexpr u32 kCost = 30;
  static constexpr bool kOneClock = false, kFailsAlone = false, kRecovers = false;

  Chain(const Task& task, const std::vector<u32>& widths, bool shadowed, Hook before = {},
        u32 riding = 0)
      : Runtime(task, shadowed || riding > 0),
        Models(task, Runtime::block_, Runtime::home_, std::move(before)) {
    const auto rows = static_cast<u32>(task.prompts.size());
    for (u32 s = 0; s < stages_; ++s) {
      entries_.emplace_back();
      if (s < riding) continue;
      cuda::StageGraphs& entry = entries_.back();
      entry.device = shadowed || riding > 0 ? 0 : static_cast<int>(s);
      must(cudaSetDevice(entry.device));
      entry.widths = widths;
      entry.block = address(base());
      auto* policies = memory_.pinned<StepPolicy>(StepLog::kRecords);
      auto* scratch = memory_.on_device<StepScratch>(1);
      auto* log = memory_.pinned<StepLog>(1);
      std::memset(log, 0, sizeof *log);
      entry.policies = address(policies);
      entry.scratch = address(scratch);
      entry.log = address(log);
      for (const u32 width : widths)
        entry.graphs.push_back(address(capture(s, rows, width, policies, scratch, log)));
    }
    make_launcher();
    reset();
  }
  ~Chain() {
    launcher_.reset();
    // As in a pipeline, the memory of the graphs is freed after their launcher.
    for (const cuda::StageGraphs& entry : entries_)
      for (const std::uintptr_t graph : entry.graphs) {
        cudaSetDevice(entry.device);
        cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(graph));
      }
    CHECK_EQ(fake_cudart::living(), 0u);
    CHECK_EQ(fake_cudart::misuses(), std::vector<std::string>{});
  }
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  const std::shared_ptr<CudaLauncher>& launcher() const { return launcher_; }
  // The error of a device after code has failed there, whatever the reason.
  static bool says(const std::string& cause, const std::string&) {
    return cause.ends_with(": unspecified launch failure (CUDA error 719)");
  }

  void drop_launcher() { launcher_.reset(); }
  // Another one over the same graphs.
  void make_launcher() {
    launcher_.reset();
    launcher_ = std::make_shared<CudaLauncher>(address(home()), entries_);
  }

 private:
  template <class T>
  static std::uintptr_t address(T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
  }
  void* home() const { return &Runtime::home_.header(); }
  void* base() const { return &Runtime::block_.header(); }

  cudaGraphExec_t capture(u32 stage, u32 rows, u32 width, StepPolicy* policies,
                          StepScratch* scratch, StepLog* log) {
    const auto array = [&](std::size_t n) { return memory_.on_device<std::int32_t>(n); };
    const StepArrays arrays{array(rows * width), array(rows), array(rows),
                            array(rows),         array(rows), array(rows)};
    std::int32_t* selected = array(rows * width);
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const std::uintptr_t on = address(stream);
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    must(cuda::open_step(scratch, on));
    const Scope scope = base() == home() ? Scope::kSystem : Scope::kDevice;
    must(cuda::plan(base(), scope, stage, rows, width, policies, scratch, arrays, on));
    must(fake_cudart::enqueue(stream, [=, this] {
      forward(stage, {rows, width, arrays.tokens, arrays.kv, arrays.query_lens,
                      arrays.num_draft_tokens, arrays.n_select, selected});
    }));
    must(cuda::commit(base(), scope, stage, rows, width, arrays, selected, width, on));
    must(cuda::close_step(base(), home(), stage, rows, arrays, scratch, log, on));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    must(cudaStreamEndCapture(stream, &graph));
    must(cudaGraphInstantiate(&executable, graph, 0));
    must(cudaGraphDestroy(graph));
    must(cudaStreamDestroy(stream));
    return executable;
  }

  std::vector<cuda::StageGraphs> entries_;
  std::shared_ptr<CudaLauncher> launcher_;
};

}  // namespace

#include "scheduler_tests.hpp"

// --- the runtime ---------------------------------------------------------------------------------

// Queued work runs late and in order, a copy reads its source when it runs, and a stream that waits
// for an event sees everything before that event.
TEST(queued_work_runs_late_and_in_order) {
  fake_cudart::reset(1);
  struct Words {
    u32 from = 1, to = 0, seen = 0;
  } words;
  std::atomic<bool> go{false};
  cudaStream_t first = nullptr, second = nullptr;
  cudaEvent_t copied = nullptr;
  must(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  must(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
  must(fake_cudart::enqueue(first, [&] {
    while (!go) usleep(10);
  }));
  must(cudaMemcpyAsync(&words.to, &words.from, sizeof words.to, cudaMemcpyHostToDevice, first));
  must(cudaEventRecord(copied, first));
  must(cudaStreamWaitEvent(second, copied, 0));
  must(cudaLaunchHostFunc(
      second, [](void* of) { static_cast<Words*>(of)->seen = static_cast<Words*>(of)->to; },
      &words));
  CHECK_EQ(cudaStreamQuery(second), cudaErrorNotReady);
  words.from = 7;
  go = true;
  must(cudaStreamSynchronize(second));
  CHECK_EQ(words.seen, 7u);
  // A failure breaks the device for all later calls.
  must(fake_cudart::enqueue(first, [] { throw Failure("a bad address"); }));
  CHECK_EQ(cudaStreamSynchronize(first), cudaErrorLaunchFailure);
  CHECK_EQ(cudaStreamQuery(second), cudaErrorLaunchFailure);
  must(fake_cudart::enqueue(second, [&] { words.seen = 9; }));
  CHECK_EQ(cudaEventRecord(copied, first), cudaErrorLaunchFailure);
  CHECK_EQ(cudaStreamDestroy(first), cudaErrorLaunchFailure);
  CHECK_EQ(cudaStreamDestroy(second), cudaErrorLaunchFailure);
  CHECK_EQ(cudaEventDestroy(copied), cudaErrorLaunchFailure);
  CHECK_EQ(words.seen, 7u);
  CHECK_EQ(fake_cudart::living(), 0u);
}

// The threads of a warp meet in its operations, each with a value of its own. Threads that call
// different operations are reported.
TEST(threads_of_a_warp_meet) {
  for (const bool diverge : {false, true}) {
    fake_cudart::reset(1);
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    u32 sums[96];
    must(cuda::launch(
        +[](u32* out, bool apart) {
          if (apart && threadIdx.x == 5) {
            __syncwarp();
          } else {
            const u32 at = blockIdx.x * 32 + threadIdx.x;
            const u32 once = __reduce_add_sync(~0u, at);
            out[at] = __reduce_add_sync(~0u, once + threadIdx.x);
          }
        },
        3, 32, reinterpret_cast<std::uintptr_t>(stream), sums, diverge));
    must(cudaStreamSynchronize(stream));
    must(cudaStreamDestroy(stream));
    CHECK_EQ(fake_cudart::misuses().empty(), !diverge);
    for (u32 at = 0; at < 96 && !diverge; ++at) {
      const u32 once = 32 * (at / 32 * 32) + 31 * 16;
      CHECK_EQ(sums[at], 32 * once + 31 * 16);
    }
  }
}

// --- the launcher by itself ----------------------------------------------------------------------

// Several steps are in flight, each with numbers of its own.
TEST(each_step_has_its_own_policy) {
  for (u32 seed = 0; seed < trials(few(8), 100); ++seed) {
    Random random{seed};
    const LongTask task(2, 1, seed);
    Chain chain(task, {8}, seed % 2 == 0);
    CudaLauncher& launcher = *chain.launcher();
    for (u32 generation = 0; generation < 2; ++generation) {
      chain.reset();
      launcher.begin([](u32) {});
      for (u32 i = 0; i < 60; ++i) {
        launcher.launch(0, {60, 0, 0, 8});
        CHECK(check::eventually([&] { return launcher.ended(0) > i; }));
      }
      u64 launched = 0;
      while (launched < 12) {
        std::vector<u32> asked;
        for (u32 n = 1 + random.below(StepLog::kRecords); n > 0; --n) {
          asked.push_back(random.below(3));
          launcher.launch(1, {0, asked.back(), 0, 8});
        }
        CHECK(check::eventually([&] { return launcher.ended(1) == launched + asked.size(); }));
        for (const u32 n : asked) {
          const Outcome outcome = launcher.outcome(1, launched++);
          if (outcome.fed > 0 && !CHECK_EQ(outcome.draft_tokens, n)) return;
        }
      }
      launcher.end();
    }
  }
}

// Notices may be late. At the end of the generation none is missing.
TEST(each_step_has_its_notice) {
  for (u32 seed = 0; seed < trials(few(8), 100); ++seed) {
    const LongTask task(3, 1, seed);
    Chain chain(task, {1}, seed % 2 == 0);
    CudaLauncher& launcher = *chain.launcher();
    for (u32 generation = 0; generation < 2; ++generation) {
      std::atomic<u64> notices[3] = {};
      chain.reset();
      launcher.begin([&](u32 stage) { ++notices[stage]; });
      for (u32 i = 0; i < 12; ++i)
        for (u32 stage = 0; stage < 3; ++stage) {
          if (i >= StepLog::kRecords)
            CHECK(check::eventually([&] { return launcher.ended(stage) + StepLog::kRecords > i; }));
          launcher.launch(stage, {8, 0, 0, 1});
        }
      launcher.end();
      for (u32 stage = 0; stage < 3; ++stage) {
        CHECK_EQ(notices[stage].load(), 12u);
        CHECK_EQ(launcher.ended(stage), 12u);
      }
    }
  }
}

// Destroyed in the middle of steps, with notices to come. The memory of its graphs is freed then.
TEST(a_launcher_ends_with_its_steps) {
  for (u32 seed = 0; seed < trials(few(600), 200); ++seed) {
    const LongTask task(2, 1, seed);
    std::atomic<u64> notices{0};
    Chain chain(task, {1}, seed % 2 == 0);
    chain.launcher()->begin([&](u32) { ++notices; });
    for (u32 i = 0; i < seed % StepLog::kRecords; ++i)
      for (const u32 stage : {0u, 1u}) chain.launcher()->launch(stage, {8, 0, 0, 1});
  }
}

// A fork has none of its threads and can still destroy it.
TEST(a_fork_drops_a_launcher) {
  const LongTask task(2, 1, 3);
  Chain chain(task, {1}, true);
  chain.launcher()->begin([](u32) {});
  const pid_t child = fork();
  if (child == 0) {
    chain.drop_launcher();
    _exit(7);
  }
  int status = 0;
  CHECK(check::eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  chain.launcher()->end();
}

// More rows than a warp has threads.
TEST(the_log_sums_over_all_rows) {
  for (u32 seed = 0; seed < trials(1, 20); ++seed) {
    const Task task(3, 40, 12, seed + 1);
    Chain chain(task, {4}, seed % 2 == 0);
    Scheduler scheduler(chain.launcher(), {.trace = 10'000}, {3, 3});
    scheduler.start();
    scheduler.finish();
    if (!chain.check_text() || !chain.check_shadow(chain.launcher()->shadow())) return;
    for (u32 s = 0; s < 3; ++s) check_sums(scheduler.trace(s), chain.block(), s);
  }
}

// --- errors --------------------------------------------------------------------------------------

namespace {

// Runs a generation to its end. At most the stage that `which` names may have failed.
void run_with_a_failure(Chain& chain, Scheduler& scheduler, const std::function<u32()>& which) {
  const u32 target = chain.block().target();
  chain.reset();
  scheduler.start();
  bool target_failed = false;
  try {
    scheduler.finish();
  } catch (const TargetFailed&) {
    target_failed = true;
  }
  const u32 only = which();
  CHECK(scheduler.failures().size() <= 1);
  for (const StageFailure& failure : scheduler.failures()) {
    if (!CHECK_EQ(failure.stage, only)) std::fprintf(stderr, "  said %s\n", failure.cause.c_str());
    CHECK(failure.cause.find("CUDA error 2") != std::string::npos);
  }
  CHECK_EQ(target_failed, only == target && !scheduler.failures().empty());
  chain.check_text(target_failed);
}

}  // namespace

// Each call of a generation fails once. Only the stage that the call was for fails, or none if the
// launcher can do without the call. No wait is endless.
TEST(every_call_may_fail) {
  u32 failures = 0;
  const u32 cases = trials(few(900), 1000);
  for (u32 seed = 0; seed < cases; ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 3;
    LongTask task(stages, 1 + random.below(2), seed, 20);
    for (Model& model : task.models) model.accuracy = random.pick({0.7, 1.0});
    task.models.back().accuracy = 1.0;
    Chain chain(task, any_widths(random), false);
    const u64 before = fake_cudart::calls();
    Scheduler scheduler(chain.launcher(), {.ahead = 1 + random.below(4)},
                        std::vector<u32>(stages - 1, 4));
    // First most of the calls of begin(), then any call.
    const u32 at = seed % 3 == 0 ? random.below(60) : random.below(400);
    fake_cudart::fail_call("", before + at, cudaErrorMemoryAllocation);
    chain.reset();
    run_with_a_failure(chain, scheduler,
                       [] { return static_cast<u32>(fake_cudart::failed_device()); });
    failures += !scheduler.failures().empty();
    // An error that has not broken the device has no further effect.
    if (fake_cudart::is_broken()) continue;
    fake_cudart::heal();
    chain.reset();
    scheduler.start();
    scheduler.finish();
    CHECK(scheduler.failures().empty());
    chain.check_text();
  }
  CHECK(failures > 0 && failures < cases);
}

// Each call of a construction fails once. The constructor throws and leaves nothing behind.
TEST(a_failed_construction_leaves_nothing) {
  const u64 threads = threads_of_this_process();
  const LongTask task(3, 1, 0);
  Chain chain(task, {1, 4}, true);
  const u64 before = fake_cudart::calls();
  chain.make_launcher();
  const u64 calls = fake_cudart::calls() - before;
  const u64 living = fake_cudart::living();
  CHECK(calls > 20 && living > 0);
  u32 refused = 0;
  for (u64 n = 0; n < calls; ++n) {
    fake_cudart::fail_call("", fake_cudart::calls() + n, cudaErrorMemoryAllocation);
    try {
      chain.make_launcher();
      CHECK_EQ(fake_cudart::living(), living);
    } catch (const std::exception& error) {
      ++refused;
      CHECK(std::string(error.what()).find("CUDA error 2") != std::string::npos);
      CHECK_EQ(fake_cudart::living(), 0u);
      threads_are(threads);
    }
    fake_cudart::heal();
    chain.make_launcher();
  }
  CHECK(refused > calls / 2);
}

// A device breaks at a random moment, whatever runs there.
TEST(a_device_breaks_at_any_moment) {
  for (u32 seed = 0; seed < trials(few(300), 600); ++seed) {
    Random random{seed + 70};
    const u32 stages = 2 + seed % 4, breaks = random.below(stages);
    const LongTask task(stages, 1, seed);
    Chain chain(task, any_widths(random), false);
    Scheduler scheduler(chain.launcher(), any_options(random), std::vector<u32>(stages - 1, 4));
    const u32 after_us = random.below(3000);
    std::thread breaker([&] {
      usleep(after_us);
      fake_cudart::break_device(static_cast<int>(breaks), cudaErrorMemoryAllocation);
    });
    run_with_a_failure(chain, scheduler, [&] { return breaks; });
    breaker.join();
  }
}

TEST_MAIN()
