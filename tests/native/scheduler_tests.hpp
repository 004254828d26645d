// The scheduler over any launcher: whatever the timings, failures, stops and changes of policy, the
// text is that of plain decoding. The file that includes this has defined the class Chain:
//
//   Chain(task, widths, shadowed, hook = {}, riding = 0)
//                      `riding`: so many of the first stages have no steps of their own
//   launcher()         that of its steps
//   kCost              in the ci profile, so many times fewer trials
//   kOneClock          launches and steps are timed by one clock
//   kFailsAlone        a stage that fails with `shadowed` leaves the others whole
//   kRecovers          a stage that has failed runs in the next generation
//   says(cause, what)  whether this is the cause of a failure where the hook threw Failure(what)
#pragma once

namespace {

// Trials of the ci profile, fewer for an expensive chain.
u32 few(u32 ci) { return std::max(ci / Chain::kCost, std::min(ci, 5u)); }

// Checks that a stage's trace adds up to what the rows have counted.
void check_sums(const std::vector<TraceEntry>& trace, const Block& block, u32 stage) {
  u64 traced[5] = {}, counted[5] = {};
  const auto add = [](u64(&to)[5], const auto&... numbers) {
    u32 i = 0;
    ((to[i++] += numbers), ...);
  };
  for (const TraceEntry& e : trace)
    add(traced, e.fed, e.draft_tokens, e.accepted, e.rolled_back, e.rollbacks);
  for (u32 r = 0; r < block.active_rows(); ++r) {
    const Counters& c = block.priv(stage, r).counters;
    add(counted, c.fed, c.drafted, c.accepted, c.truncated, c.rollbacks);
  }
  for (u32 i = 0; i < 5; ++i) CHECK_EQ(traced[i], counted[i]);
}

}  // namespace

// --- the text ------------------------------------------------------------------------------------

TEST(any_timing_gives_the_plain_text) {
  const u64 before = threads_of_this_process();
  u64 traced = 0, corrected = 0;
  for (u32 seed = 0; seed < trials(std::max(few(300), 10u), 2000); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(3), 24, seed);
    Chain chain(task, any_widths(random), random.chance(0.5));
    Options options = any_options(random);
    if (seed % 5 == 0) options.trace = 1000;
    Scheduler scheduler(chain.launcher(), options, any_lookahead(stages, random));
    for (u32 texts = 1 + random.below(2); texts > 0; --texts) {
      chain.reset();
      scheduler.start();
      scheduler.finish();
      if (!check::in_trial(seed, chain.check_text() && chain.check_caches() &&
                                     chain.check_shadow(chain.launcher()->shadow()) &&
                                     CHECK(scheduler.failures().empty())))
        return;
      for (u32 s = 0; s < stages; ++s) {
        const std::vector<TraceEntry> trace = scheduler.trace(s);
        for (const TraceEntry& entry : trace) {
          ++traced;
          corrected += entry.rolled_back > 0;
          CHECK(entry.start_ns <= entry.end_ns);
          if (Chain::kOneClock) CHECK(entry.launched_ns <= entry.start_ns);
          CHECK(entry.accepted <= entry.draft_tokens && entry.draft_tokens <= entry.fed);
          CHECK(entry.fed <= entry.width * task.prompts.size());
          CHECK(entry.in_flight < (s == stages - 1 ? 1 : options.ahead));
        }
        if (trace.size() < options.trace) check_sums(trace, chain.block(), s);  // none is lost
        if (options.trace == 0) CHECK(scheduler.trace(s).empty());
      }
    }
  }
  CHECK(traced > 0 && corrected > 0);
  threads_are(before);
}

namespace {

// The three steps of a draft without widths, before the target's forward as in a captured round.
void ride(const Block& block, std::vector<fake::Cache>& caches) {
  for (u32 i = 0; i < 3; ++i)
    for (u32 row = 0; row < caches.size(); ++row) {
      Tokens fed(2), selected(2);
      const Step step = plan(block, 0, row, {3, 0, 0, 2}, fed.data());
      if (step.query_len == 0) continue;
      caches[row].feed(fed.data(), step.kv, step.query_len, 2);
      caches[row].select(fed.data(), step.kv, step.action == Action::kStep ? step.query_len : 0, 0,
                         selected.data(), 2);
      commit(block, 0, row, step, fed.data(), selected.data());
    }
}

}  // namespace

// A stage without widths: the target's forward includes the draft's steps, as a captured round
// does. The draft has no thread and is never launched, and its draft tokens are verified as usual.
TEST(a_stage_without_widths_rides_in_anothers_steps) {
  const u64 before = threads_of_this_process();
  u64 accepted = 0;
  for (u32 seed = 0; seed < trials(few(25), 100); ++seed) {
    const Task task(2, 2, 60, seed);
    const Chain* whole = nullptr;
    std::vector<fake::Cache> cache(2, fake::Cache(task.models[0]));
    for (u32 r = 0; r < 2; ++r) cache[r].prefill(task.prompts[r]);
    const u64 threads = threads_of_this_process();
    Chain chain(
        task, {4}, seed % 2 == 1,
        [&](u32 stage, u32) {
          CHECK_EQ(stage, 1u);
          // The launcher's, the target's.
          CHECK(check::eventually([&] { return threads_of_this_process() <= threads + 2 + 1; }));
          ride(whole->block(), cache);
        },
        1);
    whole = &chain;
    {
      Scheduler scheduler(chain.launcher(), {}, {3});
      scheduler.start();
      scheduler.finish();
      CHECK(scheduler.failures().empty());
    }
    if (!chain.check_text()) return;
    for (u32 r = 0; r < 2; ++r) accepted += chain.block().priv(1, r).counters.accepted;
  }
  CHECK(accepted > trials(few(25), 100) / 2);
  threads_are(before);

  class Nowhere final : public Launcher {
   public:
    explicit Nowhere(const Block& block) : block_(block) {}
    Block shadow() const override { return block_; }
    const std::vector<u32>& widths(u32) const override { return none_; }
    u32 depth() const override { return 1; }
    std::int64_t patrol_ns() const override { return kSecond; }
    void begin(Notice) override {}
    void end() override {}
    void leave() override {}
    void settle() override {}
    void launch(u32, const StepPolicy&) override {}
    u64 ended(u32) override { return 0; }
    Outcome outcome(u32, u64) const override { return {}; }
    void set_alive(u32, bool) override {}
    void set_limit(u32, u32) override {}

   private:
    Block block_;
    std::vector<u32> none_;
  };
  const fake::BlockMemory memory(2, 1, 16);
  CHECK_THROWS(Scheduler(std::make_shared<Nowhere>(memory.block()), {}, {3}));
}

// A draft that is always right and a target with room for its draft tokens: the pipeline
// speculates.
TEST(draft_tokens_are_used) {
  for (const bool shadowed : {false, true}) {
    LongTask task(3, 1, 7, 200);
    task.pauses_us = {0, 0, 0};
    // The target's first step, which finds no draft tokens, ends when there are some.
    const Chain* made = nullptr;
    const Hook hook = [&](u32 stage, u32 step) {
      if (stage != 2 || step != 0) return;
      const Block shadow = made->launcher()->shadow();
      const u32 min_length = static_cast<u32>(task.prompts[0].size()) + 2;
      CHECK(check::eventually([&] { return Sequence(shadow, 1, 0).word().length >= min_length; }));
    };
    Chain chain(task, {1, 2, 4, 8, 16}, shadowed, hook);
    made = &chain;
    Scheduler scheduler(chain.launcher(), {}, {8, 8});
    scheduler.start();
    scheduler.finish();
    chain.check_text();
    const Counters& counters = chain.block().priv(2, 0).counters;
    CHECK_EQ(counters.accepted, counters.drafted);
    CHECK(counters.accepted > 0);
  }
}

// --- failures ------------------------------------------------------------------------------------

TEST(drafts_fail_at_every_step) {
  const u64 before = threads_of_this_process();
  for (u32 seed = 0; seed < trials(few(75), 300); ++seed) {
    Random random{seed + 500};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(2), 40, seed);
    std::vector<u32> fails_at(stages, ~0u);
    for (u32 s = 0; s + 1 < stages; ++s)
      if (random.chance(0.6)) fails_at[s] = random.below(random.pick({2u, 20u}));
    const Hook hook = [&](u32 stage, u32 step) {
      if (step == fails_at[stage]) throw Failure("stage " + std::to_string(stage) + " is tired");
    };
    Chain chain(task, any_widths(random), Chain::kFailsAlone && random.chance(0.5), hook);
    Scheduler scheduler(chain.launcher(), any_options(random), any_lookahead(stages, random));
    scheduler.start();
    scheduler.finish();
    if (!check::in_trial(seed, chain.check_text())) return;
    std::vector<bool> failed(stages);
    for (const StageFailure& failure : scheduler.failures()) {
      const std::string tired = "stage " + std::to_string(failure.stage) + " is tired";
      if (!CHECK(Chain::says(failure.cause, tired)))
        std::fprintf(stderr, "  said %s\n", failure.cause.c_str());
      CHECK_EQ(load_relaxed(&chain.launcher()->shadow().control(failure.stage).alive), 0u);
      CHECK(!failed[failure.stage]);
      failed[failure.stage] = true;
    }
    for (u32 s = 0; s < stages; ++s)
      CHECK_EQ(bool{failed[s]}, fails_at[s] != ~0u && chain.steps(s) > fails_at[s]);
    if (!Chain::kRecovers) continue;
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

// Another launcher, except the overridden methods.
class Wrapped : public Launcher {
 public:
  explicit Wrapped(std::shared_ptr<Launcher> inner) : inner_(std::move(inner)) {}

  Block shadow() const override { return inner_->shadow(); }
  const std::vector<u32>& widths(u32 stage) const override { return inner_->widths(stage); }
  u32 depth() const override { return inner_->depth(); }
  std::int64_t patrol_ns() const override { return inner_->patrol_ns(); }
  void begin(Notice notice) override { inner_->begin(std::move(notice)); }
  void end() override { inner_->end(); }
  void leave() override { inner_->leave(); }
  void settle() override { inner_->settle(); }
  void launch(u32 stage, const StepPolicy& policy) override { inner_->launch(stage, policy); }
  u64 ended(u32 stage) override { return inner_->ended(stage); }
  Outcome outcome(u32 stage, u64 n) const override { return inner_->outcome(stage, n); }
  void set_alive(u32 stage, bool alive) override { inner_->set_alive(stage, alive); }
  void set_limit(u32 row, u32 limit) override { inner_->set_limit(row, limit); }

 protected:
  std::shared_ptr<Launcher> inner_;
};

// Refuses a launch and loses its notices.
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
  void launch(u32 stage, const StepPolicy& policy) override {
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

  void launch(u32 stage, const StepPolicy& policy) override {
    inner_->launch(stage, policy);
    if (stage == stage_) ++launches_;
  }
  u32 launches() const { return launches_; }

 private:
  u32 stage_;
  std::atomic<u32> launches_{0};
};

// Hides the ends of the newest steps of the one stage until settle() or the next generation.
class Hiding final : public Wrapped {
 public:
  Hiding(std::shared_ptr<Launcher> inner, u64 hidden)
      : Wrapped(std::move(inner)), hidden_(hidden) {}

  void begin(Notice notice) override {
    launches_ = 0, hides_ = true;
    inner_->begin(std::move(notice));
  }
  void settle() override {
    inner_->settle();
    hides_ = false;
  }
  void launch(u32 stage, const StepPolicy& policy) override {
    inner_->launch(stage, policy);
    ++launches_;
  }
  u64 ended(u32 stage) override {
    const u64 hidden = hides_ ? std::min(hidden_, launches_.load()) : 0;
    return std::min(inner_->ended(stage), launches_ - hidden);
  }
  std::int64_t patrol_ns() const override { return 500'000; }

 private:
  const u64 hidden_;
  std::atomic<u64> launches_{0};
  std::atomic<bool> hides_{true};
};

}  // namespace

// A step is launched ahead before the end-of-sequence token is known. It finds no work, and the
// call returns without waiting for it. settle() waits for it before the block is reset. The caller
// gets the last token even if the step that made it has not ended.
TEST(an_ended_text_does_not_wait_for_the_step_ahead) {
  for (u32 seed = 0; seed < trials(few(20), 100); ++seed) {
    Task task(1, 1, 1, seed);
    // The text of a hash, of which one of the first tokens ends it.
    task.truth.eos_rate = 0;
    Tokens text = task.prompts[0];
    for (u32 i = 0; i < 3 + seed % 7; ++i)
      text.push_back(
          task.truth.next(fake::Truth::hash_of(text.data(), static_cast<u32>(text.size()))));
    task.truth.eos = {text.back()};
    task.limits = {100};
    Chain chain(task, {1}, seed % 2 == 0);
    const u32 hidden = 1 + seed % 3 / 2;
    Scheduler scheduler(std::make_shared<Hiding>(chain.launcher(), hidden),
                        {.ahead = 1 + hidden, .trace = 1000}, {});
    for (u32 generation = 0; generation < 3; ++generation) {
      chain.reset();
      scheduler.start();
      u64 steps = 0;
      u32 heard = static_cast<u32>(task.prompts[0].size());
      for (bool running = true; running;) {
        const Scheduler::Progress progress = scheduler.wait(steps, 20 * kSecond);
        if (!CHECK(progress.steps > steps || !progress.running)) return;
        const u32 length = Sequence(chain.launcher()->shadow(), 0, 0).word().length;
        if (progress.steps > steps) heard = length;
        steps = progress.steps, running = progress.running;
        if (!running) CHECK_EQ(heard, length);
      }
      scheduler.finish();
      if (!chain.check_text()) return;
      scheduler.settle();
      check_sums(scheduler.trace(0), chain.block(), 0);
    }
    if (!chain.check_caches() || !chain.check_shadow(chain.launcher()->shadow())) return;
  }
}

// Steps may be in flight when a launch is refused, and no thread may depend on a notice alone.
TEST(launches_are_refused_and_notices_lost) {
  for (u32 seed = 0; seed < trials(few(15), 60); ++seed) {
    Random random{seed + 4000};
    const u32 stages = 2 + seed % 3, refused = random.below(stages), at = random.below(12);
    const LongTask task(stages, 1, seed, 16);
    Chain chain(task, {1, 4}, seed % 2 == 0);
    Options options = any_options(random);
    const auto launcher = std::make_shared<Unreliable>(chain.launcher(), refused, at, 8);
    Scheduler scheduler(launcher, options, std::vector<u32>(stages - 1, 4));
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
    if (!check::in_trial(
            seed, chain.check_text(!scheduler.failures().empty() && refused == stages - 1) &&
                      chain.check_caches() && chain.check_shadow(chain.launcher()->shadow())))
      return;
  }
}

TEST(a_failing_target_ends_the_text_with_its_cause) {
  for (u32 at = 0; at < few(12); ++at) {
    Random random{at};
    Task task(3, 2, 60, at);
    task.truth.eos_rate = 0;
    task.limits = {40, 60};
    const Hook hook = [&](u32 stage, u32 step) {
      if (stage == 2 && step == at) throw Failure("out of memory");
    };
    Chain chain(task, {1, 4}, Chain::kFailsAlone && at % 2 == 0, hook);
    Options options = any_options(random);
    Scheduler scheduler(chain.launcher(), options, {2, 2});
    scheduler.start();
    std::string said;
    try {
      scheduler.finish();
    } catch (const TargetFailed& error) {
      said = error.what();
    }
    if (!CHECK_EQ(scheduler.failures().size(), 1u)) return;
    const std::string cause = scheduler.failures()[0].cause;
    CHECK(Chain::says(cause, "out of memory"));
    CHECK_EQ(said, "the target (stage 2) failed: " + cause);
    chain.check_text(true);
    CHECK_EQ(chain.steps(2), at + 1);
  }
}

// --- stops ---------------------------------------------------------------------------------------

// A stop after any number of forwards, from within a forward, or from outside at any moment.
TEST(stops_at_every_step) {
  const u64 before = threads_of_this_process();
  for (u32 at = 0; at < trials(few(100), 400); ++at) {
    Random random{at + 900};
    const u32 stages = 2 + at % 4;
    const Task task(stages, 1 + random.below(2), 60, at);
    std::atomic<u32> forwards{0};
    std::atomic<Scheduler*> running{nullptr};
    const u32 stop_at = random.below(120);
    const bool inside = random.chance(0.7);
    const Hook hook = [&](u32, u32) {
      if (forwards++ == stop_at && inside) running.load()->request_stop();
    };
    Chain chain(task, any_widths(random), random.chance(0.5), hook);
    Scheduler scheduler(chain.launcher(), any_options(random), any_lookahead(stages, random));
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
    if (!check::in_trial(at, chain.check_text(true) && chain.check_caches() &&
                                 chain.check_shadow(chain.launcher()->shadow())))
      return;
    CHECK_EQ(forwards.load(), ended);
    // The same scheduler continues with the next text.
    forwards = 1'000'000;
    chain.reset();
    scheduler.start();
    scheduler.finish();
    if (!chain.check_text()) return;
    scheduler.stop();  // nothing runs
  }
  threads_are(before);
}

// A scheduler that is destroyed in the middle of a text.
TEST(destruction_is_a_stop) {
  const u64 before = threads_of_this_process();
  for (u32 i = 0; i < trials(10, 40); ++i) {
    const Task task(4, 2, 60, i);
    Chain chain(task, {1, 8}, i % 2 == 0);
    Scheduler scheduler(chain.launcher(), {}, {3, 4, 5});
    scheduler.start();
    usleep(i * 10);
  }
  threads_are(before);
}

// --- while it runs -------------------------------------------------------------------------------

TEST(policies_change_while_running) {
  for (u32 seed = 0; seed < trials(few(50), 200); ++seed) {
    Random random{seed + 2000};
    const u32 stages = 2 + seed % 4;
    const Task task(stages, 1 + random.below(2), 100, seed);
    Chain chain(task, any_widths(random), random.chance(0.5));
    Scheduler scheduler(chain.launcher(), any_options(random), any_lookahead(stages, random));
    scheduler.start();
    u64 steps = 0;
    while (true) {
      const Scheduler::Progress progress = scheduler.wait(steps, kSecond);
      if (!progress.running) break;
      steps = progress.steps;
      scheduler.steer(any_lookahead(stages, random));
      for (u32 s = 0; s < stages; ++s) scheduler.trace(s);  // may be read at any moment
    }
    scheduler.finish();
    if (!check::in_trial(seed, chain.check_text())) return;
  }
}

TEST(rows_are_ended_from_outside) {
  for (u32 seed = 0; seed < trials(few(15), 60); ++seed) {
    Random random{seed + 3000};
    Task task(3, 2, 60, seed);
    task.truth.eos_rate = 0;
    task.limits = {250, 250};
    Chain chain(task, {1, 4, 8}, seed % 2 == 0);
    const Options options = any_options(random);
    Scheduler scheduler(chain.launcher(), options, {3, 3});
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
      // The step in flight may still append three draft tokens and a token of its own.
      CHECK(length >= chain.block().span(r).limit && length <= stood[r] + 4);
      if (!CHECK_EQ(tokens(chain.block(), 2, r, begin, length),
                    Tokens(text.begin() + begin, text.begin() + length)))
        return;
    }
  }
}

// One step runs while the next one is launched.
TEST(a_draft_launches_ahead) {
  Task task(2, 1, 60, 9);
  task.truth.eos_rate = 0;
  task.limits = {60};
  task.models[0].accuracy = 1.0;
  const Counting* draft = nullptr;
  const Hook hook = [&](u32, u32 step) {  // the target's, too: its text must not be complete
    if (step == 0) CHECK(check::eventually([&] { return draft->launches() >= 2; }));
  };
  Chain chain(task, {1, 8}, false, hook);
  const auto launcher = std::make_shared<Counting>(chain.launcher(), 0);
  draft = launcher.get();
  Scheduler scheduler(launcher, {.ahead = 2, .trace = 1000}, {4});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  CHECK_EQ(scheduler.trace(0)[1].in_flight, 1u);
}

// If the target's next step does not depend on the running one, it is launched early. With a known
// end no step is launched in vain. After an end-of-sequence token one step may be, and changes
// nothing.
TEST(a_target_alone_launches_ahead) {
  u64 together = 0, in_vain = 0;
  for (u32 seed = 0; seed < trials(std::min(60u, few(900)), 400); ++seed) {
    Random random{seed + 6000};
    const u32 riding = seed % 2, ahead = 1 + random.below(4);
    Task task(1 + riding, 1 + random.below(3), 40, seed);
    const Chain* whole = nullptr;
    std::vector<fake::Cache> caches(task.prompts.size(), fake::Cache(task.models[0]));
    for (u32 r = 0; r < task.prompts.size(); ++r) caches[r].prefill(task.prompts[r]);
    const Hook hook = [&](u32, u32) {
      if (riding > 0) ride(whole->block(), caches);
    };
    Chain chain(task, {1 + 3 * riding}, random.chance(0.5), hook, riding);
    whole = &chain;
    Scheduler scheduler(chain.launcher(), {.ahead = ahead, .trace = 1000},
                        std::vector<u32>(riding, 3));
    scheduler.start();
    scheduler.finish();
    scheduler.settle();
    if (!chain.check_text() || (riding == 0 && !chain.check_caches()) ||
        !CHECK(scheduler.failures().empty())) {
      std::fprintf(stderr, "  seed %u\n", seed);
      return;
    }
    const std::vector<TraceEntry> trace = scheduler.trace(riding);
    u64 fed = 0, empty = 0;
    for (const TraceEntry& entry : trace) {
      CHECK(entry.in_flight < ahead);
      together += entry.in_flight > 0;
      CHECK(empty == 0 || entry.fed == 0);  // only at the end
      empty += entry.fed == 0;
      fed += entry.fed;
    }
    CHECK_EQ(scheduler.wait(0, 0).steps, trace.size());
    CHECK(empty < ahead);
    bool ends_itself = false;
    u64 counted = 0, max_steps = 0;
    for (u32 r = 0; r < task.prompts.size(); ++r) {
      const Counters& counters = chain.block().priv(riding, r).counters;
      counted += counters.fed;
      max_steps = std::max(max_steps, counters.steps);
      ends_itself |=
          Sequence(chain.block(), riding, r).word().length < task.limits[r] || riding > 0;
    }
    CHECK_EQ(fed, counted);
    CHECK_EQ(trace.size() - empty, max_steps);
    if (!ends_itself) CHECK_EQ(empty, 0u);
    in_vain += empty;
  }
  CHECK(together > 0 && in_vain > 0);
}

// The caller sees every step of the target. Its tokens can be read as soon as a step is reported.
TEST(the_caller_follows_the_target) {
  Task task(2, 1, 60, 5);
  task.truth.eos_rate = 0;
  task.limits = {240};
  Chain chain(task, {1, 4}, true);
  Scheduler scheduler(chain.launcher(), {}, {3});
  scheduler.start();
  u64 steps = 0;
  while (true) {
    const Scheduler::Progress progress = scheduler.wait(steps, 60 * kSecond);
    CHECK(progress.steps > steps || !progress.running);
    const u32 length = Sequence(chain.launcher()->shadow(), 1, 0).word().length;
    CHECK(length >= task.prompts[0].size() + progress.steps);
    steps = progress.steps;
    if (!progress.running) break;
  }
  scheduler.finish();
  CHECK_EQ(scheduler.wait(0, 0).steps, chain.block().priv(1, 0).counters.steps);
  chain.check_text();
}

// A draft at its lookahead sleeps, however long the target takes: it launches no step that would
// find nothing to do.
TEST(no_step_is_launched_in_vain) {
  Task task(2, 1, 60, 9);
  task.truth.eos_rate = 0;
  task.limits = {60};
  task.models[0].accuracy = 1.0;
  // A draft that would launch once more has time for it. No step may be launched while there is
  // room and run after the text is complete.
  const Block* block = nullptr;
  const Hook slow_target = [&](u32 stage, u32) {
    if (stage == 0) return;
    CHECK(check::eventually([&] {
      const u32 bound = std::min(60u, Sequence(*block, 1, 0).word().length + 4);
      return Sequence(*block, 0, 0).word().length == bound;
    }));
    usleep(2000);
  };
  Chain chain(task, {1, 8}, false, slow_target);
  block = &chain.block();
  Scheduler scheduler(chain.launcher(), {.trace = 1000}, {4});
  scheduler.start();
  scheduler.finish();
  chain.check_text();
  for (const u32 s : {0u, 1u})
    for (const TraceEntry& entry : scheduler.trace(s)) CHECK(entry.fed > 0);
}
