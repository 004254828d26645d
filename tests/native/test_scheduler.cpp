// The scheduler over the protocol, with the host launcher and fake models: whatever the timings,
// failures, stops and changes of policy, the text is that of plain decoding. To be run under
// ThreadSanitizer as well.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <thread>

#include "check.hpp"
#include "fake_stage.hpp"
#include "protocol/replicate.hpp"
#include "runtime/clock.hpp"
#include "runtime/generation.hpp"
#include "runtime/host_launcher.hpp"
#include "runtime/scheduler.hpp"

using namespace pipespec;
using fake::kSlow;
using fake::Model;
using fake::Random;
using fake::Tokens;
using fake::Truth;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

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

constexpr std::int64_t kSecond = 1'000'000'000;

u64 threads_of_this_process() {
  // ThreadSanitizer has one of its own, from the first that we start.
  static const bool first = (std::thread([] {}).join(), true);
  (void)first;
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<u64>(std::distance(begin(tasks), end(tasks)));
}

// A thread that has been joined may still be listed for a moment.
bool threads_are(u64 expected) {
  check::comes([&] { return threads_of_this_process() == expected; });
  return CHECK_EQ(threads_of_this_process(), expected);
}

// One generation: models, prompts, limits, and what happens to them.
struct Task {
  Truth truth;
  std::vector<Model> models;
  std::vector<Tokens> prompts;
  std::vector<u32> limits;
  std::vector<u32> pauses_us;  // per stage: a step lasts up to so long; 0: no time at all
  u64 seed;

  Task(u32 stages, u32 rows, u32 length, u64 of)
      : truth{.seed = fake::mix(of), .eos = {3, 2}}, seed(of) {
    Random random{of};
    truth.eos_rate = random.pick({0.0, 0.02});
    truth.vocabulary = random.pick({4, 40});
    for (u32 s = 0; s < stages; ++s) {
      models.push_back(
          {&truth, s + 1 == stages ? 1.0 : random.pick({0.0, 0.6, 0.9, 1.0}), random.below(3)});
      pauses_us.push_back(random.pick({0u, 0u, 3u, 30u}));
    }
    for (u32 r = 0; r < rows; ++r) {
      prompts.emplace_back();
      for (u32 i = 1 + random.below(4); i > 0; --i)
        prompts[r].push_back(static_cast<std::int32_t>(random.below(9)));
      limits.push_back(static_cast<u32>(prompts[r].size()) + 1 + random.below(length));
    }
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A chain of fake models under a host launcher. `before` is called ahead of every forward with the
// stage and the number of the step; it may throw.
class Chain {
 public:
  using Hook = std::function<void(u32 stage, u32 step)>;

  // `riding`: so many of the first stages have no steps of their own.
  Chain(const Task& task, const HostLauncher::Widths& widths, bool mirrored, Hook before = {},
        u32 riding = 0)
      : task_(task),
        stages_(static_cast<u32>(task.models.size())),
        memory_(stages_, static_cast<u32>(task.prompts.size()), 256),
        before_(std::move(before)),
        caches_(stages_),
        steps_(stages_) {
    std::vector<HostLauncher::Model> models;
    for (u32 s = 0; s < stages_; ++s)
      models.push_back([this, s](const HostLauncher::Rectangle& r) { forward(s, r); });
    std::vector<HostLauncher::Widths> all(stages_, widths);
    for (u32 s = 0; s < riding; ++s) all[s].clear();
    launcher_ = std::make_shared<HostLauncher>(memory_.base(), models, all, mirrored);
    reset();
  }

  void reset() {
    std::vector<u32> starts;
    Tokens last;
    for (const Tokens& prompt : task_.prompts) {
      starts.push_back(static_cast<u32>(prompt.size()));
      last.push_back(prompt.back());
    }
    pipespec::reset(block(), starts, task_.limits, last, task_.truth.eos);
    for (u32 s = 0; s < stages_; ++s) {
      caches_[s].assign(task_.prompts.size(), fake::Cache(task_.models[s]));
      for (u32 r = 0; r < task_.prompts.size(); ++r) caches_[s][r].prefill(task_.prompts[r]);
      steps_[s] = 0;
    }
  }

  const Block& block() const { return memory_.block(); }
  const std::shared_ptr<HostLauncher>& launcher() const { return launcher_; }
  u32 steps(u32 stage) const { return steps_[stage]; }

  // The target's rows: the whole plain text, or with `part` a beginning of it.
  bool check_text(bool part = false) const {
    for (u32 r = 0; r < task_.prompts.size(); ++r) {
      const Tokens text = fake::plain(task_.models.back(), task_.prompts[r], task_.limits[r]);
      const auto begin = static_cast<u32>(task_.prompts[r].size()) - 1;
      const u32 length = Sequence(block(), block().target(), r).word().length;
      if (!CHECK(part ? length <= text.size() : length == text.size())) return false;
      if (!CHECK_EQ(tokens(block(), block().target(), r, begin, length),
                    Tokens(text.begin() + begin, text.begin() + length)))
        return false;
    }
    return true;
  }

  // Every cache holds its stage's sequence, however it was truncated and refilled.
  bool check_caches() const {
    for (u32 s = 0; s < stages_; ++s)
      for (u32 r = 0; r < task_.prompts.size(); ++r) {
        const Tokens& prompt = task_.prompts[r];
        const Sequence sequence(block(), s, r);
        for (u32 p = 0; p < block().priv(s, r).kv; ++p)
          if (!CHECK_EQ(caches_[s][r].entries()[p],
                        p < prompt.size() ? prompt[p] : sequence.token(p)))
            return false;
      }
    return true;
  }

  // The mirror is the block, in all that foresee() looks at.
  bool check_mirror() const {
    const Block mirror = launcher_->mirror();
    for (u32 s = 0; s < stages_; ++s)
      for (u32 r = 0; r < task_.prompts.size(); ++r) {
        const Word word = Sequence(block(), s, r).word();
        const auto start = static_cast<u32>(task_.prompts[r].size());
        if (!CHECK_EQ(pack(Sequence(mirror, s, r).word()), pack(word))) return false;
        if (!CHECK_EQ(fake::tokens_of(mirror, s, r, start, word.length),
                      fake::tokens_of(block(), s, r, start, word.length)))
          return false;
        CHECK_EQ(Sequence(mirror, s, r).settled(), Sequence(block(), s, r).settled());
        CHECK_EQ(mirror.priv(s, r).kv, block().priv(s, r).kv);
        CHECK_EQ(mirror.priv(s, r).agreed, block().priv(s, r).agreed);
        CHECK_EQ(mirror.priv(s, r).seen_epoch, block().priv(s, r).seen_epoch);
      }
    return true;
  }

 private:
  void forward(u32 stage, const HostLauncher::Rectangle& r) {
    const u32 step = steps_[stage]++;
    if (before_) before_(stage, step);
    Random random{fake::mix(task_.seed * 64 + stage) + step};
    if (task_.pauses_us[stage] > 0 && random.below(3) == 0)
      usleep(random.below(task_.pauses_us[stage]));
    for (u32 row = 0; row < r.rows; ++row) {
      const std::int32_t* tokens = r.tokens + std::size_t{row} * r.width;
      const auto kv = static_cast<u32>(r.kv[row]), n_hint = static_cast<u32>(r.n_hint[row]);
      caches_[stage][row].feed(tokens, kv, static_cast<u32>(r.n_fed[row]), r.width);
      caches_[stage][row].select(tokens, kv, static_cast<u32>(r.n_select[row]), n_hint,
                                 r.selected + std::size_t{row} * r.width, r.width);
    }
  }

  const Task& task_;
  u32 stages_;
  fake::BlockMemory memory_;
  Hook before_;
  std::vector<std::vector<fake::Cache>> caches_;
  std::vector<std::atomic<u32>> steps_;
  std::shared_ptr<HostLauncher> launcher_;
};

Steering any_steering(u32 stages, Random& random) {
  Steering out;
  for (u32 s = 0; s + 1 < stages; ++s)
    out.windows.push_back(random.pick({0u, 1u, 3u, 8u, 20u, ~0u}));
  out.wait = random.pick({0u, 0u, 2u, 6u});
  out.decode_meanwhile = random.chance(0.5);
  return out;
}

Options any_options(Random& random) {
  return {.schedule = random.chance(0.3) ? Schedule::kLockstep : Schedule::kStreams,
          .ahead = 1 + random.below(4),
          .patience = random.pick({0.0, 1.5, 20.0}),
          .trace = random.pick({0u, 3u, 1000u})};
}

std::vector<u32> any_widths(Random& random) {
  return random.pick({std::vector<u32>{1, 2, 4, 8, 16}, {1}, {2, 8}, {5}, {1, 32}});
}

}  // namespace

// --- foresee, replicate --------------------------------------------------------------------------

// foresee() says what plan() then does, and changes nothing: over random walks of chains in which
// every stage takes steps in any order.
TEST(foresee_says_what_plan_does) {
  u32 corrections = 0;
  for (u32 seed = 0; seed < 300 / kSlow; ++seed) {
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
      const Policy policy{random.pick({0u, 2u, 9u, ~0u}), random.below(12), random.below(4), width};
      Tokens seen(width, -7), fed(width, -7);
      const std::string before(static_cast<const char*>(memory.base()), block.header().bytes);
      const Step step = foresee(block, stage, 0, policy, seen.data());
      const Step mirrored = foresee(copy.block(), stage, 0, policy, seen.data());
      if (!CHECK(before ==
                 std::string(static_cast<const char*>(memory.base()), block.header().bytes)))
        return;
      const u32 epoch = Sequence(block, stage, 0).word().epoch;
      const Step done = plan(block, stage, 0, policy, fed.data());
      corrections += Sequence(block, stage, 0).word().epoch != epoch;
      for (const Step& s : {step, mirrored})
        if (!CHECK(s.action == done.action && s.kv == done.kv && s.n_fed == done.n_fed &&
                   s.n_hint == done.n_hint))
          return;
      if (!CHECK_EQ(seen, fed)) return;
      if (done.n_fed > 0) {
        Tokens selected(width);
        caches[stage].feed(fed.data(), done.kv, done.n_fed, width);
        caches[stage].select(fed.data(), done.kv, done.action == Action::kStep ? done.n_fed : 0,
                             done.n_hint, selected.data(), width);
        commit(block, stage, 0, done, fed.data(), selected.data());
      }
      replicate(block, copy.block(), stage, 0);
    }
  }
  CHECK(corrections > 1000 / kSlow);  // else it has shown less than it says
}

// --- the text ------------------------------------------------------------------------------------

TEST(any_timing_gives_the_plain_text) {
  const u64 before = threads_of_this_process();
  u64 traced = 0, corrected = 0;
  for (u32 seed = 0; seed < (kSlow > 1 ? 600 : 2000); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(3), 24, seed);
    Chain chain(task, any_widths(random), random.chance(0.5));
    const Options options = any_options(random);
    Scheduler scheduler(chain.launcher(), options, any_steering(stages, random));
    for (u32 texts = 1 + random.below(2); texts > 0; --texts) {
      chain.reset();
      scheduler.start();
      scheduler.finish();
      if (!chain.check_text() || !chain.check_caches() || !chain.check_mirror() ||
          !CHECK(scheduler.failures().empty())) {
        std::fprintf(stderr, "  seed %u\n", seed);
        return;
      }
      for (u32 s = 0; s < stages; ++s) {
        u64 fed = 0;
        for (const TraceEntry& entry : scheduler.trace(s)) {
          ++traced;
          fed += entry.fed;
          corrected += entry.taken_back > 0;
          CHECK(entry.launched_ns <= entry.start_ns && entry.start_ns <= entry.end_ns);
          CHECK(entry.accepted <= entry.hints && entry.hints <= entry.fed);
          CHECK(entry.fed <= entry.width * task.prompts.size());
          CHECK(entry.in_flight < (s == stages - 1 ? 1 : options.ahead));
        }
        u64 counted = 0;
        for (u32 r = 0; r < task.prompts.size(); ++r)
          counted += chain.block().priv(s, r).counters.fed;
        if (scheduler.trace(s).size() < options.trace) CHECK_EQ(fed, counted);  // none is lost
        if (options.trace == 0) CHECK(scheduler.trace(s).empty());
      }
    }
  }
  CHECK(traced > 0 && corrected > 0);  // some are in lockstep: whatever the machine does
  threads_are(before);
}

// A stage without widths: the target's forward takes the draft's steps along, as one captured round
// does. The draft has no thread, is never launched, and its hints count all the same.
TEST(a_stage_without_widths_rides_in_anothers_steps) {
  const u64 before = threads_of_this_process();
  u64 accepted = 0;
  for (const Schedule schedule : {Schedule::kStreams, Schedule::kLockstep}) {
    for (u32 seed = 0; seed < 100 / kSlow; ++seed) {
      const Task task(2, 2, 60, seed);
      const Chain* whole = nullptr;
      std::vector<fake::Cache> cache(2, fake::Cache(task.models[0]));
      for (u32 r = 0; r < 2; ++r) cache[r].prefill(task.prompts[r]);
      const u64 threads = threads_of_this_process();
      Chain chain(
          task, {4}, seed % 2 == 1,
          [&](u32 stage, u32) {
            CHECK_EQ(stage, 1u);
            CHECK(threads_of_this_process() <= threads + 2 + 1);  // the launcher's, the target's
            for (u32 i = 0; i < 3; ++i)
              for (u32 row = 0; row < 2; ++row) {
                Tokens fed(2), selected(2);
                const Step step = plan(whole->block(), 0, row, {3, 0, 0, 2}, fed.data());
                if (step.n_fed == 0) continue;
                cache[row].feed(fed.data(), step.kv, step.n_fed, 2);
                cache[row].select(fed.data(), step.kv,
                                  step.action == Action::kStep ? step.n_fed : 0, 0, selected.data(),
                                  2);
                commit(whole->block(), 0, row, step, fed.data(), selected.data());
              }
          },
          1);
      whole = &chain;
      {
        Scheduler scheduler(chain.launcher(), {.schedule = schedule}, {.windows = {3}});
        scheduler.start();
        scheduler.finish();
        CHECK(scheduler.failures().empty());
      }
      if (!chain.check_text()) return;
      for (u32 r = 0; r < 2; ++r) accepted += chain.block().priv(1, r).counters.accepted;
    }
  }
  CHECK(accepted > 100 / kSlow);
  threads_are(before);

  class Nowhere final : public Launcher {
   public:
    explicit Nowhere(const Block& block) : block_(block) {}
    Block mirror() const override { return block_; }
    const std::vector<u32>& widths(u32) const override { return none_; }
    u32 depth() const override { return 1; }
    std::int64_t patrol_ns() const override { return kSecond; }
    void begin(Notice) override {}
    void end() override {}
    void launch(u32, const Policy&) override {}
    u64 ended(u32) override { return 0; }
    Outcome outcome(u32, u64) const override { return {}; }
    void set_alive(u32, bool) override {}
    void set_limit(u32, u32) override {}

   private:
    Block block_;
    std::vector<u32> none_;
  };
  const fake::BlockMemory memory(2, 1, 16);
  CHECK_THROWS(Scheduler(std::make_shared<Nowhere>(memory.block()), {}, {.windows = {3}}));
}

// A draft that is always right and a target with room for its hints: the pipeline speculates.
TEST(hints_are_used) {
  for (const Schedule schedule : {Schedule::kStreams, Schedule::kLockstep}) {
    for (const bool mirrored : {false, true}) {
      Task task(3, 1, 60, 7);
      task.truth.eos_rate = 0;
      task.limits = {static_cast<u32>(task.prompts[0].size()) + 200};
      for (Model& model : task.models) model.accuracy = 1.0;
      task.pauses_us = {0, 0, 0};
      // The target's first step finds nothing yet; then it waits for what will surely come: long
      // steps make the deadline longer than any machine needs.
      const StageControl* draft = nullptr;
      const Chain::Hook hook = [&](u32 stage, u32 step) {
        if (stage == 1) usleep(100);
        if (stage == 2 && step == 0)
          CHECK(check::comes([&] { return load_relaxed(&draft->step_ns) > 0; }));
      };
      Chain chain(task, {1, 2, 4, 8, 16}, mirrored, hook);
      draft = &chain.launcher()->mirror().control(1);
      Scheduler scheduler(chain.launcher(), {.schedule = schedule, .patience = 1e6},
                          {.windows = {8, 8}, .wait = 8});
      scheduler.start();
      scheduler.finish();
      chain.check_text();
      const Counters& counters = chain.block().priv(2, 0).counters;
      CHECK_EQ(counters.accepted, counters.drafted);
      // 9 tokens per step, but for those before the first draft's time is known.
      if (schedule == Schedule::kLockstep) CHECK_EQ(counters.steps, u64{(200 + 8) / 9});
      CHECK(counters.accepted > 0);
    }
  }
}

// Acceptance comes back after a correction; a middle stage that obeys one must not lose its
// upstream for ever.
TEST(acceptance_recovers) {
  Task task(3, 1, 60, 11);
  task.truth.eos_rate = 0;
  task.limits = {static_cast<u32>(task.prompts[0].size()) + 200};
  for (Model& model : task.models) model.accuracy = 1.0;
  for (u32 s = 0; s < 2; ++s) task.models[s].wrong_at = 20;
  task.pauses_us = {0, 0, 0};
  Chain chain(task, {1, 4, 16}, true);
  Scheduler scheduler(chain.launcher(), {.schedule = Schedule::kLockstep}, {.windows = {4, 8}});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  const Counters& counters = chain.block().priv(2, 0).counters;
  CHECK(counters.drafted - counters.accepted <= 8);
  CHECK(counters.steps <= 200 / 9 + 4);
}

// `wait` for what cannot come: a bet with a deadline, awake or asleep, and none on a dead stage.
TEST(waiting_ends) {
  for (const bool decode_meanwhile : {false, true}) {
    for (const u32 window : {1u, 4u}) {
      Task task(2, 1, 60, 3);
      task.truth.eos_rate = 0;
      task.limits = {static_cast<u32>(task.prompts[0].size()) + 60};
      task.pauses_us = {200, 0};
      const Chain::Hook hook = [&](u32 stage, u32 step) {
        if (stage == 0 && step == 20) throw Failure("gone");
      };
      Chain chain(task, {1, 2, 8}, true, hook);
      Scheduler scheduler(chain.launcher(), {.patience = 3.0},
                          {.windows = {window}, .wait = 5, .decode_meanwhile = decode_meanwhile});
      scheduler.start();
      scheduler.finish();
      chain.check_text();
    }
  }
}

// Meanwhile it goes on by itself: here the draft does not go on before the target has.
TEST(the_target_decodes_while_it_waits) {
  Task task(2, 1, 60, 3);
  task.truth.eos_rate = 0;
  task.limits = {static_cast<u32>(task.prompts[0].size()) + 60};
  task.models[0].accuracy = 1.0;
  std::atomic<u32> verified{0};
  const Chain::Hook hook = [&](u32 stage, u32 step) {
    if (stage == 1) ++verified;
    if (stage == 0 && step == 3) CHECK(check::comes([&] { return verified >= 20; }));
  };
  Chain chain(task, {1, 2, 8}, true, hook);
  Scheduler scheduler(chain.launcher(), {.patience = 1e6, .trace = 1000},
                      {.windows = {8}, .wait = 5, .decode_meanwhile = true});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  for (const TraceEntry& entry : scheduler.trace(1)) CHECK(entry.fed > 1 || entry.width == 1);
}

// Asleep, it has them in the end: each step is as wide as it asked for, but for the first, when it
// cannot know how long to wait, and the last, when there is no room.
TEST(the_target_gets_the_hints_it_waits_for) {
  Task task(2, 1, 60, 3);
  task.truth.eos_rate = 0;
  task.limits = {static_cast<u32>(task.prompts[0].size()) + 100};
  task.models[0].accuracy = 1.0;
  task.pauses_us = {0, 0};
  const StageControl* draft = nullptr;
  const Chain::Hook hook = [&](u32 stage, u32 step) {
    if (stage == 0) usleep(100);  // the deadline is long, on any machine
    if (stage == 1 && step == 0)
      CHECK(check::comes([&] { return load_relaxed(&draft->step_ns) > 0; }));
  };
  Chain chain(task, {1, 2, 8}, true, hook);
  draft = &chain.launcher()->mirror().control(0);
  Scheduler scheduler(chain.launcher(), {.ahead = 2, .patience = 1e6, .trace = 1000},
                      {.windows = {7}, .wait = 5});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  u32 left = 100;
  for (const TraceEntry& step : scheduler.trace(1)) {
    CHECK(step.step == 0 || step.hints >= std::min(5u, left - 1));
    left -= step.accepted + 1;
  }
  CHECK_EQ(left, 0u);
}

// --- failures ------------------------------------------------------------------------------------

TEST(drafts_fail_at_every_step) {
  const u64 before = threads_of_this_process();
  for (u32 seed = 0; seed < 300 / kSlow; ++seed) {
    Random random{seed + 500};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(2), 40, seed);
    std::vector<u32> fails_at(stages, ~0u);
    for (u32 s = 0; s + 1 < stages; ++s)
      if (random.chance(0.6)) fails_at[s] = random.below(random.pick({2u, 20u}));
    const Chain::Hook hook = [&](u32 stage, u32 step) {
      if (step == fails_at[stage]) throw Failure("stage " + std::to_string(stage) + " is tired");
    };
    Chain chain(task, any_widths(random), random.chance(0.5), hook);
    Scheduler scheduler(chain.launcher(), any_options(random), any_steering(stages, random));
    scheduler.start();
    scheduler.finish();
    if (!chain.check_text()) {
      std::fprintf(stderr, "  seed %u\n", seed);
      return;
    }
    std::vector<bool> failed(stages);
    for (const StageFailure& failure : scheduler.failures()) {
      CHECK_EQ(failure.cause, "stage " + std::to_string(failure.stage) + " is tired");
      CHECK_EQ(load_relaxed(&chain.block().control(failure.stage).alive), 0u);
      CHECK(!failed[failure.stage]);
      failed[failure.stage] = true;
    }
    for (u32 s = 0; s < stages; ++s)
      CHECK_EQ(bool{failed[s]}, fails_at[s] != ~0u && chain.steps(s) > fails_at[s]);
    // The next generation starts with all of them.
    fails_at.assign(stages, ~0u);
    chain.reset();
    scheduler.start();
    scheduler.finish();
    if (!chain.check_text() || !CHECK(scheduler.failures().empty())) return;
  }
  threads_are(before);
}

namespace {

// Another launcher, but for what is overridden.
class Wrapped : public Launcher {
 public:
  explicit Wrapped(std::shared_ptr<Launcher> inner) : inner_(std::move(inner)) {}

  Block mirror() const override { return inner_->mirror(); }
  const std::vector<u32>& widths(u32 stage) const override { return inner_->widths(stage); }
  u32 depth() const override { return inner_->depth(); }
  std::int64_t patrol_ns() const override { return inner_->patrol_ns(); }
  void begin(Notice notice) override { inner_->begin(std::move(notice)); }
  void end() override { inner_->end(); }
  void launch(u32 stage, const Policy& policy) override { inner_->launch(stage, policy); }
  u64 ended(u32 stage) override { return inner_->ended(stage); }
  Outcome outcome(u32 stage, u64 n) const override { return inner_->outcome(stage, n); }
  void set_alive(u32 stage, bool alive) override { inner_->set_alive(stage, alive); }
  void set_limit(u32 row, u32 limit) override { inner_->set_limit(row, limit); }

 protected:
  std::shared_ptr<Launcher> inner_;
};

// Refuses a launch, and its notices get lost.
class Unreliable final : public Wrapped {
 public:
  Unreliable(std::shared_ptr<Launcher> inner, u32 stage, u32 refuses, u32 loses_one_in)
      : Wrapped(std::move(inner)), stage_(stage), refuses_(refuses), loses_(loses_one_in) {}

  std::int64_t patrol_ns() const override { return 500'000; }
  void begin(Notice notice) override {
    launches_ = 0;
    inner_->begin([this, notice](u32 stage) {
      if (notices_++ % loses_ != 0) notice(stage);
    });
  }
  void launch(u32 stage, const Policy& policy) override {
    if (stage == stage_ && launches_++ == refuses_) throw Failure("refused");
    inner_->launch(stage, policy);
  }

 private:
  u32 stage_, refuses_, loses_;
  u32 launches_ = 0;
  std::atomic<u32> notices_{1};
};

// Counts the launches of one stage.
class Counting final : public Wrapped {
 public:
  Counting(std::shared_ptr<Launcher> inner, u32 stage) : Wrapped(std::move(inner)), stage_(stage) {}

  void launch(u32 stage, const Policy& policy) override {
    inner_->launch(stage, policy);
    if (stage == stage_) ++launches_;
  }
  u32 launches() const { return launches_; }

 private:
  u32 stage_;
  std::atomic<u32> launches_{0};
};

}  // namespace

// Steps may be under way when a launch is refused, and nobody may wait for a notice alone.
TEST(launches_are_refused_and_notices_lost) {
  for (u32 seed = 0; seed < 60 / kSlow; ++seed) {
    Random random{seed + 4000};
    const u32 stages = 2 + seed % 3, refused = random.below(stages), at = random.below(12);
    Task task(stages, 1, 20, seed);
    task.truth.eos_rate = 0;
    task.limits = {static_cast<u32>(task.prompts[0].size()) + 16};
    Chain chain(task, {1, 4}, seed % 2 == 0);
    Options options = any_options(random);
    const auto launcher = std::make_shared<Unreliable>(chain.launcher(), refused, at, 8);
    Scheduler scheduler(launcher, options, {.windows = std::vector<u32>(stages - 1, 4)});
    scheduler.start();
    try {
      scheduler.finish();
      CHECK(refused != stages - 1 || scheduler.failures().empty());
    } catch (const TargetFailed&) {
      CHECK_EQ(refused, stages - 1);
    }
    for (const StageFailure& failure : scheduler.failures()) {
      CHECK_EQ(failure.stage, refused);
      CHECK_EQ(failure.cause, "refused");
    }
    if (!chain.check_text(!scheduler.failures().empty() && refused == stages - 1) ||
        !chain.check_caches() || !chain.check_mirror()) {
      std::fprintf(stderr, "  seed %u\n", seed);
      return;
    }
  }
}

TEST(a_failing_target_ends_the_text_with_its_cause) {
  for (u32 at = 0; at < 12; ++at) {
    Random random{at};
    Task task(3, 2, 60, at);
    task.truth.eos_rate = 0;
    task.limits = {40, 60};
    const Chain::Hook hook = [&](u32 stage, u32 step) {
      if (stage == 2 && step == at) throw Failure("out of memory");
    };
    Chain chain(task, {1, 4}, at % 2 == 0, hook);
    Options options = any_options(random);
    Scheduler scheduler(chain.launcher(), options, {.windows = {2, 2}});
    scheduler.start();
    std::string said;
    try {
      scheduler.finish();
    } catch (const TargetFailed& error) {
      said = error.what();
    }
    CHECK_EQ(said, "the target (stage 2) failed: out of memory");
    CHECK_EQ(scheduler.failures().size(), 1u);
    chain.check_text(true);
    CHECK_EQ(chain.steps(2), at + 1);
  }
}

// --- stops ---------------------------------------------------------------------------------------

// After any number of forwards, from within one, or from outside at any moment.
TEST(stops_at_every_step) {
  const u64 before = threads_of_this_process();
  for (u32 at = 0; at < 400 / kSlow; ++at) {
    Random random{at + 900};
    const u32 stages = 2 + at % 4;
    const Task task(stages, 1 + random.below(2), 60, at);
    std::atomic<u32> forwards{0};
    std::atomic<Scheduler*> running{nullptr};
    const u32 stop_at = random.below(120);
    const bool inside = random.chance(0.7);
    const Chain::Hook hook = [&](u32, u32) {
      if (forwards++ == stop_at && inside) running.load()->request_stop();
    };
    Chain chain(task, any_widths(random), random.chance(0.5), hook);
    Scheduler scheduler(chain.launcher(), any_options(random), any_steering(stages, random));
    running = &scheduler;
    scheduler.start();
    if (inside) {
      scheduler.finish();
    } else {
      usleep(random.below(400));
      scheduler.stop();
      CHECK(!scheduler.wait(0, 0).running);
    }
    const u32 ended = forwards;
    if (!chain.check_text(true) || !chain.check_caches() || !chain.check_mirror()) {
      std::fprintf(stderr, "  stop %u\n", at);
      return;
    }
    CHECK_EQ(forwards.load(), ended);
    // The same scheduler goes on with the next text.
    forwards = 1'000'000;
    chain.reset();
    scheduler.start();
    scheduler.finish();
    if (!chain.check_text()) return;
    scheduler.stop();  // nothing runs
  }
  threads_are(before);
}

// A scheduler that is thrown away in the middle of a text.
TEST(destruction_is_a_stop) {
  const u64 before = threads_of_this_process();
  for (u32 i = 0; i < 40 / kSlow; ++i) {
    const Task task(4, 2, 60, i);
    Chain chain(task, {1, 8}, i % 2 == 0);
    Scheduler scheduler(chain.launcher(), {}, {.windows = {3, 4, 5}});
    scheduler.start();
    usleep(i * 10);
  }
  threads_are(before);
}

// --- while it runs -------------------------------------------------------------------------------

TEST(policies_change_while_running) {
  for (u32 seed = 0; seed < 200 / kSlow; ++seed) {
    Random random{seed + 2000};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(2), 100, seed);
    Chain chain(task, any_widths(random), random.chance(0.5));
    Scheduler scheduler(chain.launcher(), any_options(random), any_steering(stages, random));
    scheduler.start();
    u64 steps = 0;
    while (true) {
      const Scheduler::Progress progress = scheduler.wait(steps, kSecond);
      if (!progress.running) break;
      steps = progress.steps;
      scheduler.steer(any_steering(stages, random));
      for (u32 s = 0; s < stages; ++s) scheduler.trace(s);  // may be read at any moment
    }
    scheduler.finish();
    if (!chain.check_text()) {
      std::fprintf(stderr, "  seed %u\n", seed);
      return;
    }
  }
}

TEST(rows_are_ended_from_outside) {
  for (u32 seed = 0; seed < 60 / kSlow; ++seed) {
    Random random{seed + 3000};
    Task task(3, 2, 60, seed);
    task.truth.eos_rate = 0;
    task.limits = {250, 250};
    Chain chain(task, {1, 4, 8}, seed % 2 == 0);
    const Options options = any_options(random);
    Scheduler scheduler(chain.launcher(), options, {.windows = {3, 3}});
    scheduler.start();
    u32 stood[2];
    for (const u32 r : {0u, 1u}) {
      scheduler.wait(random.below(r == 0 ? 6 : 20), kSecond);
      scheduler.end_row(r);
      stood[r] = Sequence(chain.block(), 2, r).word().length;
    }
    scheduler.finish();
    for (u32 r = 0; r < 2; ++r) {
      const Tokens text = fake::plain(task.models.back(), task.prompts[r], 250);
      const u32 length = Sequence(chain.block(), 2, r).word().length;
      const auto begin = static_cast<u32>(task.prompts[r].size()) - 1;
      // The step that was under way may still land, with three hints and a token of its own.
      CHECK(length >= chain.block().span(r).limit && length <= stood[r] + 4);
      if (!CHECK_EQ(tokens(chain.block(), 2, r, begin, length),
                    Tokens(text.begin() + begin, text.begin() + length)))
        return;
    }
  }
}

// One step runs, the next one is launched behind it.
TEST(a_draft_launches_ahead) {
  Task task(2, 1, 60, 9);
  task.truth.eos_rate = 0;
  task.limits = {60};
  task.models[0].accuracy = 1.0;
  const Counting* draft = nullptr;
  const Chain::Hook hook = [&](u32, u32 step) {  // the target's, too: its text must not be complete
    if (step == 0) CHECK(check::comes([&] { return draft->launches() >= 2; }));
  };
  Chain chain(task, {1, 8}, false, hook);
  const auto launcher = std::make_shared<Counting>(chain.launcher(), 0);
  draft = launcher.get();
  Scheduler scheduler(launcher, {.ahead = 2, .trace = 1000}, {.windows = {4}});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  CHECK_EQ(scheduler.trace(0)[1].in_flight, 1u);
}

// The caller sees every step of the target's, and no step is ever said to have ended before its
// tokens can be read.
TEST(the_caller_follows_the_target) {
  Task task(2, 1, 60, 5);
  task.truth.eos_rate = 0;
  task.limits = {240};
  Chain chain(task, {1, 4}, true);
  Scheduler scheduler(chain.launcher(), {}, {.windows = {3}});
  scheduler.start();
  u64 steps = 0;
  while (true) {
    const Scheduler::Progress progress = scheduler.wait(steps, 60 * kSecond);
    CHECK(progress.steps > steps || !progress.running);
    const u32 length = Sequence(chain.launcher()->mirror(), 1, 0).word().length;
    CHECK(length >= task.prompts[0].size() + progress.steps);
    steps = progress.steps;
    if (!progress.running) break;
  }
  scheduler.finish();
  CHECK_EQ(scheduler.wait(0, 0).steps, chain.block().priv(1, 0).counters.steps);
  chain.check_text();
}

// A draft at its bound sleeps: no steps that find nothing, however long the target takes.
TEST(nobody_launches_for_nothing) {
  Task task(2, 1, 60, 9);
  task.truth.eos_rate = 0;
  task.limits = {60};
  task.models[0].accuracy = 1.0;
  // A draft that would launch once more has the time to. And no step of its is launched while there
  // is room for it, and run when the text is complete.
  const Block* block = nullptr;
  const Chain::Hook slow_target = [&](u32 stage, u32) {
    if (stage == 0) return;
    CHECK(check::comes([&] {
      const u32 bound = std::min(60u, Sequence(*block, 1, 0).word().length + 4);
      return Sequence(*block, 0, 0).word().length == bound;
    }));
    usleep(2000);
  };
  Chain chain(task, {1, 8}, false, slow_target);
  block = &chain.block();
  Scheduler scheduler(chain.launcher(), {.trace = 1000}, {.windows = {4}});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  for (const u32 s : {0u, 1u})
    for (const TraceEntry& entry : scheduler.trace(s)) CHECK(entry.fed > 0);
}

// --- bad input -----------------------------------------------------------------------------------

// A trace of many entries is megabytes per stage, and only the present generation's are told.
TEST(trace_buffers_are_made_once) {
  Task task(2, 1, 60, 5);
  task.truth.eos_rate = 0;
  Chain chain(task, {1}, false);
  const u64 at_first = large_arrays;
  Scheduler scheduler(chain.launcher(), {.trace = 1 << 16}, {.windows = {0}});
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
  const Steering good{.windows = {1, 1}};
  CHECK_THROWS(Scheduler(nullptr, {}, good));
  CHECK_THROWS(Scheduler(launcher, {}, {.windows = {1}}));
  CHECK_THROWS(Scheduler(launcher, {.ahead = 0}, good));
  CHECK_THROWS(Scheduler(launcher, {.ahead = 9}, good));
  CHECK_THROWS(Scheduler(launcher, {.patience = -1.0}, good));
  CHECK_THROWS(Scheduler(launcher, {.schedule = static_cast<Schedule>(7)}, good));
  Scheduler scheduler(launcher, {}, good);
  CHECK_THROWS(scheduler.trace(3));
  scheduler.start();
  CHECK_THROWS(scheduler.start(), 0);
  CHECK_THROWS(scheduler.end_row(1), 0);
  CHECK_THROWS(scheduler.steer({.windows = {1, 2, 3}}), 0);
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
