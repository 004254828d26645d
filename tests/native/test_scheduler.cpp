// The scheduler over the protocol, with the host launcher and fake models: whatever the timings,
// failures, stops and changes of policy, the text is that of plain decoding. To be run under
// ThreadSanitizer as well.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "chains.hpp"
#include "protocol/replicate.hpp"

using namespace pipespec;
using namespace chains;
using check::trials;

namespace {

// Arrays of a megabyte and more that this program has allocated.
std::atomic<u64> large_arrays{0};

}  // namespace

void* operator new[](std::size_t size) {
  if (size >= 1 << 20) ++large_arrays;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

class Chain : public Models {
 public:
  static constexpr u32 kCost = 1;
  static constexpr bool kOneClock = true, kFailsAlone = true, kRecovers = true;

  Chain(const Task& task, const HostLauncher::Widths& widths, bool shadowed, Hook before = {},
        u32 riding = 0)
      : Chain(std::make_unique<fake::BlockMemory>(static_cast<u32>(task.models.size()),
                                                  static_cast<u32>(task.prompts.size()), 256),
              task, widths, shadowed, std::move(before), riding) {}

  const std::shared_ptr<HostLauncher>& launcher() const { return launcher_; }
  static bool says(const std::string& cause, const std::string& what) { return cause == what; }

 private:
  Chain(std::unique_ptr<fake::BlockMemory> memory, const Task& task,
        const HostLauncher::Widths& widths, bool shadowed, Hook before, u32 riding)
      : Models(task, memory->block(), memory->block(), std::move(before)),
        memory_(std::move(memory)) {
    std::vector<HostLauncher::Model> models;
    for (u32 s = 0; s < stages_; ++s)
      models.push_back([this, s](const Rectangle& r) { forward(s, r); });
    std::vector<HostLauncher::Widths> all(stages_, widths);
    for (u32 s = 0; s < riding; ++s) all[s].clear();
    launcher_ = std::make_shared<HostLauncher>(memory_->base(), models, all, shadowed);
    reset();
  }

  std::unique_ptr<fake::BlockMemory> memory_;
  std::shared_ptr<HostLauncher> launcher_;
};

}  // namespace

#include "scheduler_tests.hpp"

// --- foresee, replicate --------------------------------------------------------------------------

// foresee() returns what plan() then returns, and changes nothing. Random walks of chains whose
// stages take steps in any order.
TEST(foresee_predicts_plan) {
  u32 corrections = 0;
  for (u32 seed = 0; seed < trials(75, 300); ++seed) {
    Random random{seed};
    const u32 stages = 2 + random.below(4);
    const Task task(stages, 1, 60, seed);
    fake::BlockMemory memory(stages, 1, 128), copy(stages, 1, 128);
    const Block& block = memory.block();
    const auto start = static_cast<u32>(task.prompts[0].size());
    reset(block, {start}, task.limits, {task.prompts[0].back()}, task.truth.eos);
    std::memcpy(copy.base(), memory.base(), block.header().bytes);
    std::vector<fake::Cache> caches;
    for (const Model& model : task.models) caches.emplace_back(model).prefill(task.prompts[0]);
    for (u32 i = 0; i < 400; ++i) {
      const u32 stage = random.below(stages), width = random.pick({1u, 2u, 5u, 16u});
      const StepPolicy policy{random.pick({0u, 2u, 9u, ~0u}), random.below(12), random.below(4),
                              width};
      Tokens seen(width, -7), fed(width, -7);
      const std::string before(static_cast<const char*>(memory.base()), block.header().bytes);
      const Step step = foresee(block, stage, 0, policy, seen.data());
      const Step shadowed = foresee(copy.block(), stage, 0, policy, seen.data());
      if (!CHECK(before ==
                 std::string(static_cast<const char*>(memory.base()), block.header().bytes)))
        return;
      const u32 epoch = Sequence(block, stage, 0).word().epoch;
      const Step done = plan(block, stage, 0, policy, fed.data());
      corrections += Sequence(block, stage, 0).word().epoch != epoch;
      for (const Step& s : {step, shadowed})
        if (!CHECK(s.action == done.action && s.kv == done.kv && s.query_len == done.query_len &&
                   s.num_draft_tokens == done.num_draft_tokens))
          return;
      if (!CHECK_EQ(seen, fed)) return;
      if (done.query_len > 0) {
        Tokens selected(width);
        caches[stage].feed(fed.data(), done.kv, done.query_len, width);
        caches[stage].select(fed.data(), done.kv, done.action == Action::kStep ? done.query_len : 0,
                             done.num_draft_tokens, selected.data(), width);
        commit(block, stage, 0, done, fed.data(), selected.data());
      }
      replicate(block, copy.block(), stage, 0, 1);
    }
  }
  CHECK(corrections > trials(250, 1000));  // otherwise the walks were too simple
}

// --- bad input -----------------------------------------------------------------------------------

// A trace of many entries takes megabytes per stage. trace() returns those of the present
// generation only.
TEST(trace_buffers_are_made_once) {
  Task task(2, 1, 60, 5);
  task.truth.eos_rate = 0;
  Chain chain(task, {1}, false);
  const u64 at_first = large_arrays;
  Scheduler scheduler(chain.launcher(), {.trace = 1 << 16}, {0});
  const u64 made = large_arrays;
  CHECK_EQ(made, at_first + 2);
  for (const u32 tokens : {40u, 10u}) {
    task.limits = {static_cast<u32>(task.prompts[0].size()) + tokens};
    chain.reset();
    scheduler.start();
    scheduler.finish();
    chain.check_text();
    const std::vector<TraceEntry> trace = scheduler.trace(1);
    CHECK_EQ(trace.size(), std::size_t{tokens});
    for (u64 n = 0; n < trace.size(); ++n) CHECK_EQ(trace[n].step, n);
  }
  CHECK_EQ(large_arrays, made);
}

TEST(settings_that_make_no_sense_are_refused) {
  const Task task(3, 1, 10, 1);
  Chain chain(task, {1, 4}, false);
  const auto& launcher = chain.launcher();
  const std::vector<u32> good{1, 1};
  CHECK_THROWS(Scheduler(nullptr, {}, good));
  CHECK_THROWS(Scheduler(launcher, {}, std::vector<u32>{1}));
  CHECK_THROWS(Scheduler(launcher, {.ahead = 0}, good));
  CHECK_THROWS(Scheduler(launcher, {.ahead = 9}, good));
  Scheduler scheduler(launcher, {}, good);
  CHECK_THROWS(scheduler.trace(3));
  scheduler.start();
  CHECK_THROWS(scheduler.start(), 0);
  CHECK_THROWS(scheduler.end_row(1), 0);
  CHECK_THROWS(scheduler.steer({1, 2, 3}), 0);
  scheduler.finish();
  chain.check_text();
  const auto models = [](u32 n) {
    return std::vector<HostLauncher::Model>(n, [](const HostLauncher::Rectangle&) {});
  };
  void* base = &chain.block().header();
  CHECK_THROWS(HostLauncher(base, models(2), {{1}, {1}}, false));
  CHECK_THROWS(HostLauncher(base, models(3), {{1}, {1}, {}}, false));
  CHECK_THROWS(HostLauncher(base, models(3), {{0, 1}, {1}, {1}}, false));
  CHECK_THROWS(HostLauncher(base, models(3), {{1}, {1}, {4, 4}}, false));
}

TEST_MAIN()
