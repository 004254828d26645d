// plan() and commit() in one thread: the traps by themselves, then thousands of random schedules.
// That each plan feeds what the rules say is in tests/kernels/test_state_histories.py.
// Stages run in any order, also between the plan and the commit of another stage. In every order
// the target's text is that of plain decoding, and every cache holds its stage's sequence.
#include <cstdio>
#include <optional>

#include "runtime/stage_port.hpp"
#include "tasks.hpp"

using namespace pipespec;
using check::trials;
using fake::Model;
using fake::Random;
using fake::Tokens;
using fake::Truth;
using u32 = std::uint32_t;

namespace {

constexpr u32 kEverything = 0xffffffffu;

// A pipeline of fake stages for one row. Checks the invariants after every half step.
class Chain {
 public:
  // The last of `models` is the target.
  Chain(Truth truth, std::vector<Model> models, Tokens prompt, u32 limit)
      : truth_(std::move(truth)),
        models_(std::move(models)),
        prompt_(std::move(prompt)),
        memory_(static_cast<u32>(models_.size()), 1, fake::power_of_two(limit + 1)) {
    for (Model& model : models_) model.truth = &truth_;
    restart(limit);
  }

  void restart(u32 limit) {
    limit_ = limit;
    fake::set_eos(block(), truth_.eos);
    reset_row(block(), 0, start(), limit, prompt_.back());
    text_ = fake::plain(models_.back(), prompt_, limit);
    stages_.clear();
    for (const Model& model : models_) {
      stages_.emplace_back(model);
      stages_.back().cache.prefill(prompt_);
    }
    for (u32 s = 0; s < stages(); ++s) {
      const Private& priv = block().priv(s, 0);
      expect(CHECK(priv.agreed == start() && priv.seen_epoch == 0 && priv.counters.steps == 0));
      check(s);
    }
  }

  const Block& block() const { return memory_.block(); }
  u32 stages() const { return static_cast<u32>(models_.size()); }
  u32 target() const { return stages() - 1; }
  u32 start() const { return static_cast<u32>(prompt_.size()); }
  u32 limit() const { return limit_; }
  const Tokens& text() const { return text_; }
  Sequence sequence(u32 stage) const { return Sequence(block(), stage, 0); }
  u32 length(u32 stage) const { return sequence(stage).word().length; }
  u32 kv(u32 stage) const { return block().priv(stage, 0).kv; }
  Counters& counters(u32 stage) const { return block().priv(stage, 0).counters; }
  Tokens tokens(u32 stage) const {
    return fake::tokens_of(block(), stage, 0, start() - 1, length(stage));
  }
  const Tokens& fed(u32 stage) const { return stages_[stage].tokens; }
  bool pending(u32 stage) const { return stages_[stage].step.has_value(); }
  bool finished() const { return stages_[target()].finished; }
  bool good() const { return good_; }

  Step plan(u32 stage, StepPolicy policy) {
    Stage& own = stages_[stage];
    const u32 before = length(stage);
    u32 reached = 0;
    if (stage != target()) reached = std::max(length(target()), length(stage + 1));
    own.tokens.assign(policy.width + 1, Cache::kGarbage);
    const Step step = pipespec::plan(block(), stage, 0, policy, own.tokens.data());

    expect(CHECK(step.query_len <= policy.width && step.num_draft_tokens <= step.query_len));
    expect(CHECK_EQ(own.tokens[policy.width], Cache::kGarbage));  // did not write past the buffer
    const bool feeds = step.action == Action::kStep || step.action == Action::kCatchUp;
    expect(CHECK_EQ(feeds, step.query_len > 0));
    expect(CHECK(step.num_draft_tokens <= policy.max_draft_tokens &&
                 (stage > 0 || step.num_draft_tokens == 0)));
    if (feeds) {
      expect(CHECK_EQ(step.kv, kv(stage)));
      const u32 known = step.query_len - step.num_draft_tokens;
      for (u32 i = 0; i < known; ++i) {
        expect(CHECK_EQ(own.tokens[i], sequence(stage).token(step.kv + i)));
      }
      if (step.action == Action::kStep) {
        expect(CHECK_EQ(step.kv + known, length(stage)));
      } else {
        expect(CHECK(step.num_draft_tokens == 0 && step.kv + known < length(stage)));
      }
    }
    if (stage == target()) {
      expect(CHECK_EQ(length(stage), before));  // the target follows no stage
      if (step.action == Action::kFinished) own.finished = true;
      expect(CHECK(step.action != Action::kIdle));
    } else {
      expect(CHECK(step.action != Action::kFinished));
      own.bound = u32(std::min<std::uint64_t>(std::uint64_t{reached} + policy.lookahead, limit_));
      expect(CHECK(length(stage) <= std::max(before, reached)));
    }
    if (feeds) {
      const u32 columns =
          step.query_len + (step.query_len + before) % 3;  // other rows may be wider
      own.tokens.resize(std::max<std::size_t>(own.tokens.size(), columns));
      own.cache.feed(own.tokens.data(), step.kv, step.query_len, columns);
      own.step = step;
    }
    check(stage);
    return step;
  }

  u32 commit(u32 stage) {
    Stage& own = stages_[stage];
    const Step step = *own.step;
    own.step.reset();
    Tokens selected(step.query_len + 1, -1);
    if (step.action == Action::kStep) {
      own.cache.select(own.tokens.data(), step.kv, step.query_len, step.num_draft_tokens,
                       selected.data(), step.query_len + 1);
    }
    const u32 before = length(stage);
    const u32 appended =
        pipespec::commit(block(), stage, 0, step, own.tokens.data(), selected.data());
    expect(CHECK_EQ(length(stage), before + appended));
    expect(CHECK_EQ(std::min(1u, appended), u32(step.action == Action::kStep &&
                                                before < load_relaxed(&block().span(0).limit))));
    expect(CHECK(appended <= step.num_draft_tokens + 1));
    if (stage != target() && appended > 0) expect(CHECK(length(stage) <= own.bound));
    check(stage);
    return appended;
  }

  // A whole step. Returns what plan() said.
  Action step(u32 stage, StepPolicy policy) {
    const Step step = plan(stage, policy);
    if (step.query_len > 0) commit(stage);
    return step.action;
  }

  // Runs to the end with the target alone.
  void finish(StepPolicy policy = {8, 8, 0, 8}) {
    for (u32 i = 0; i <= limit_ && !finished() && good_; ++i) step(target(), policy);
    expect(CHECK(finished()));
  }

  void check_text() {
    expect(CHECK_EQ(tokens(target()), Tokens(text_.begin() + start() - 1, text_.end())));
  }

 private:
  using Cache = fake::Cache;
  struct Stage {
    explicit Stage(const Model& model) : cache(model) {}
    Cache cache;
    std::optional<Step> step;
    Tokens tokens;
    u32 bound = 0;
    bool finished = false;
    Word seen{0, 0};  // at the last check, and the tokens then
    Tokens snapshot;
  };

  void expect(bool held) { good_ = good_ && held; }

  void check(u32 stage) {
    Stage& own = stages_[stage];
    const Word word = sequence(stage).word();
    const u32 committed = sequence(stage).committed();
    const Tokens now = tokens(stage);
    expect(CHECK(word.length >= start() && word.length <= limit_));
    expect(CHECK(kv(stage) < word.length && kv(stage) >= start() - 1));
    expect(
        CHECK(committed >= start() && committed <= word.length && committed <= length(target())));
    if (stage == target()) expect(CHECK(word.epoch == 0 && committed == word.length));
    // Below `committed` the tokens are the target's and never change.
    for (u32 p = start(); p < committed; ++p) {
      if (!CHECK_EQ(now[p - start() + 1], text_[p])) return expect(false);
    }
    // Within an epoch nothing is rolled back.
    if (word.epoch == own.seen.epoch) {
      expect(CHECK(word.length >= own.seen.length));
      expect(CHECK(std::equal(own.snapshot.begin(), own.snapshot.end(), now.begin())));
    }
    expect(CHECK(word.epoch >= own.seen.epoch));
    own.seen = word;
    own.snapshot = now;
    // The cache holds the sequence over [0, kv): no hole, nothing stale, nothing twice.
    for (u32 p = 0; p < kv(stage); ++p) {
      const std::int32_t expected = p < start() ? prompt_[p] : now[p - start() + 1];
      if (!CHECK_EQ(own.cache.entries()[p], expected)) return expect(false);
    }
  }

  Truth truth_;
  std::vector<Model> models_;
  Tokens prompt_;
  fake::BlockMemory memory_;
  u32 limit_ = 0;
  Tokens text_;
  std::vector<Stage> stages_;
  bool good_ = true;
};

Model right() { return {nullptr}; }

const Tokens kPrompt{5, 6, 7, 8};
constexpr u32 kStart = 4;
const Truth kTruth{.seed = 3, .eos = {2}};

StepPolicy policy(u32 lookahead = 8, u32 max_draft_tokens = 16, u32 min_draft_tokens = 0,
                  u32 width = 32) {
  return {lookahead, max_draft_tokens, min_draft_tokens, width};
}

// Plans and commits in any order, any policy at any time, stages that stop for good.
void run_any_order(Chain& chain, Random& random, bool deaths) {
  const u32 stages = chain.stages();
  std::vector<u32> weight(stages), waited(stages, 0);
  for (u32& w : weight) w = random.pick({1u, 1u, 3u, 10u});
  std::vector<bool> dead(stages, false);
  StepPolicy fixed{random.pick({1u, 2u, 3u, 8u, 20u, kEverything}),
                   random.pick({0u, 1u, 3u, 8u, 99u}), random.pick({0u, 0u, 1u, 3u, 8u}),
                   random.pick({2u, 3u, 4u, 9u, 40u})};
  const bool changing = random.chance(0.5);
  u32 target_steps = 0;
  const u32 appended_at_most = chain.limit() - chain.start();
  while (!chain.finished() && chain.good()) {
    u32 total = 0;
    for (u32 w : weight) total += w;
    u32 at = random.below(total), stage = 0;
    while (at >= weight[stage]) at -= weight[stage++];
    if (deaths && stage != chain.target() && random.chance(0.02)) {
      dead[stage] = true;  // it may have a plan that it never commits, and the others may never
                           // notice
      if (random.chance(0.7)) chain.block().control(stage).alive = 0;
    }
    if (dead[stage]) continue;
    if (chain.pending(stage)) {
      if (random.chance(0.6)) {
        if (stage == chain.target()) ++target_steps;
        chain.commit(stage);
      }
      continue;
    }
    StepPolicy policy = fixed;
    if (changing) {
      policy = {random.below(10), random.below(8), random.below(8), 2 + random.below(10)};
      if (random.chance(0.2)) policy.lookahead = kEverything;
    }
    if (waited[stage] >= 4) policy.min_draft_tokens = 0;  // the deadline
    const Step step = chain.plan(stage, policy);
    waited[stage] = step.action == Action::kWait ? waited[stage] + 1 : 0;
    if (step.action == Action::kWait) {
      CHECK(policy.min_draft_tokens > 0 && stage > 0 &&
            chain.block().control(stage - 1).alive != 0);
    }
  }
  CHECK(target_steps <= appended_at_most);  // at least one token per step
  chain.check_text();
}

Model random_model(Random& random, u32 limit) {
  Model model{nullptr, random.pick({0.0, 0.3, 0.7, 0.9, 0.97, 1.0}), random.below(4)};
  if (random.chance(0.1)) model.right_until = kStart + random.below(limit);
  model.says_eos = random.chance(0.05);
  return model;
}

}  // namespace

// --- plan: what is fed -------------------------------------------------------------------------

TEST(planning_twice_changes_nothing) {
  Chain chain(kTruth, {right(), right(), right()}, kPrompt, 40);
  for (int i = 0; i < 5; ++i) chain.step(0, policy());
  for (int i = 0; i < 3; ++i) chain.step(1, policy(8, 2));
  for (u32 s = 0; s < 3; ++s) {
    const Step one = chain.plan(s, policy());
    const Word word = chain.sequence(s).word();
    const Step two = chain.plan(s, policy());
    CHECK(one.action == two.action && one.kv == two.kv && one.query_len == two.query_len);
    CHECK_EQ(pack(chain.sequence(s).word()), pack(word));
  }
}

// --- the end of a text -------------------------------------------------------------------------

namespace {

// Runs a given target text under many schedules, with drafts that propose the same text or another
// one.
void check_script(const Tokens& prompt, const Tokens& continuation, const Tokens& eos, u32 limit,
                  std::size_t expected_length) {
  Truth truth{.seed = 11, .eos = eos};
  truth.script = prompt;
  truth.script.insert(truth.script.end(), continuation.begin(), continuation.end());
  for (u32 seed = 0; seed < trials(15, 60); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 3;
    std::vector<Model> models;
    for (u32 s = 0; s + 1 < stages; ++s) {
      models.push_back(seed % 4 == 0 ? right() : random_model(random, limit));
    }
    models.push_back(right());
    Chain chain(truth, models, prompt, limit);
    if (!CHECK_EQ(chain.text().size(), expected_length)) return;
    run_any_order(chain, random, false);
    if (!check::in_trial(seed, CHECK(chain.good()))) return;
  }
}

}  // namespace

TEST(eos_at_every_place) {
  check_script(kPrompt, {2, 20, 21}, {2}, 30, kStart + 1);                   // the first token
  check_script(kPrompt, {20, 2, 21, 2, 22}, {2}, 30, kStart + 2);            // twice in a lookahead
  check_script(kPrompt, {20, 21, 22, 3, 2, 22}, {9, 2, 3}, 30, kStart + 4);  // a list of ids
  check_script(kPrompt, {20, 21, 22, 23, 2}, {2}, kStart + 5, kStart + 5);   // on the last place
  check_script(kPrompt, {20, 21, 22, 23, 2}, {2}, kStart + 4, kStart + 4);   // just past it
  check_script({5, 2}, {20, 21, 2}, {2}, 20, 5);   // a prompt that ends in EOS continues
  check_script({2}, {20, 21, 22, 2}, {2}, 20, 5);  // a prompt that is only EOS
  check_script({2, 2}, {2, 20}, {2}, 20, 3);
  check_script(kPrompt, {20, 21}, {-5}, 20, 20);  // none at all
  for (u32 at = 0; at < 12; ++at) {               // as a bonus, at the edge of a lookahead, past it
    Tokens text(at, 30);
    text.push_back(2);
    text.push_back(31);
    check_script(kPrompt, text, {2}, 40, kStart + at + 1);
  }
}

TEST(a_limit_that_is_lowered_during_a_step_holds) {
  for (u32 left : {0u, 1u, 3u, 6u, 9u}) {
    Chain chain(kTruth, {right(), right(), right()}, kPrompt, 60);
    for (int i = 0; i < 5; ++i) chain.step(0, policy());
    for (u32 s : {1u, 2u}) {
      CHECK_EQ(chain.plan(s, policy()).num_draft_tokens, s == 1 ? 5u : std::min(left, 6u));
      chain.block().span(0).limit = kStart + left;
      CHECK_EQ(chain.commit(s), s == 1 ? std::min(left, 6u) : std::min(left, 7u));
      chain.block().span(0).limit = 60;
    }
    CHECK(chain.good());
  }
}

TEST(a_neighbour_of_any_length_fills_no_ring) {
  for (u32 length : {41u, 1000u, kEverything}) {
    Chain chain(kTruth, {right(), right(), right()}, kPrompt, 40);
    for (int i = 0; i < 5; ++i) chain.step(2, policy());
    Published& neighbour = chain.block().published(1, 0);
    neighbour.word = pack({7, length});  // as a stage with damaged memory may publish it
    neighbour.committed = length;
    for (u32 i = 0; i < chain.block().capacity(); ++i) chain.block().ring(1, 0)[i] = 77;
    chain.step(0, policy());
    CHECK(chain.length(0) <= 40);
    CHECK_EQ(chain.sequence(0).committed(), kStart + 5);
    for (int i = 0; i < 3; ++i) chain.step(2, policy());
    chain.step(0, policy());
    CHECK_EQ(chain.sequence(0).committed(), kStart + 8);
    CHECK(chain.good());
  }
}

// --- back-pressure and waiting -----------------------------------------------------------------

TEST(a_prompt_that_ends_in_eos_does_not_end_the_waiting) {
  Chain chain(kTruth, {right(), right()}, {5, 2}, 40);
  CHECK_EQ(chain.plan(1, policy(8, 8, 1)).action, Action::kWait);
  chain.step(0, policy());
  CHECK_EQ(chain.plan(1, policy(8, 8, 1)).num_draft_tokens, 1u);
}

// With a lookahead of at least min_draft_tokens, every wait ends without a deadline.
TEST(waiting_ends_by_itself_when_the_lookahead_allows) {
  for (u32 seed = 0; seed < trials(100, 400); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 4, wait = 1 + random.below(6);
    const u32 limit = kStart + 1 + random.below(50);
    Truth truth{.seed = seed, .eos = {2}, .eos_rate = random.pick({0.0, 0.05})};
    std::vector<Model> models;
    for (u32 s = 0; s + 1 < stages; ++s) models.push_back(random_model(random, limit));
    models.push_back(right());
    Chain chain(truth, models, kPrompt, limit);
    const u32 lookahead = wait + random.below(3);
    u32 in_vain = 0;
    while (!chain.finished() && chain.good() && in_vain < 100 * stages) {
      const Action action =
          chain.step(random.below(stages), policy(lookahead, 9, wait, 2 + wait + random.below(8)));
      const bool fed = action == Action::kStep || action == Action::kCatchUp;
      in_vain = fed ? 0 : in_vain + 1;
    }
    if (!CHECK(chain.finished() && chain.good())) {
      std::fprintf(stderr, "  seed %u, %u stages, waiting for %u of %u\n", seed, stages, wait,
                   lookahead);
      return;
    }
    chain.check_text();
  }
}

// --- whole chains ------------------------------------------------------------------------------

TEST(any_order_any_policy_gives_the_plain_text) {
  for (u32 seed = 0; seed < trials(1500, 6000); ++seed) {
    Random random{seed};
    const u32 stages = 2 + random.below(4);
    const u32 limit = kStart + 1 + random.below(60);
    Truth truth{.seed = seed,
                .vocabulary = random.pick({2, 5, 40}),
                .eos = random.pick<Tokens>({{-5}, {2}, {3, 4, 2}}),
                .eos_rate = random.pick({0.0, 0.01, 0.1})};
    std::vector<Model> models;
    for (u32 s = 0; s + 1 < stages; ++s) models.push_back(random_model(random, limit));
    models.push_back(right());
    Chain chain(truth, models, kPrompt, limit);
    run_any_order(chain, random, seed % 3 == 0);
    if (!CHECK(chain.good())) {
      std::fprintf(stderr, "  seed %u, %u stages\n", seed, stages);
      return;
    }
  }
}

TEST(a_block_is_used_again) {
  Chain chain(kTruth, {right(), {nullptr, 0.7, 1}, right()}, kPrompt, 60);
  for (u32 seed = 0; seed < 50; ++seed) {
    Random random{seed};
    chain.restart(kStart + 1 + random.below(56));
    run_any_order(chain, random, false);
    if (!CHECK(chain.good())) return;
  }
}

namespace {

// Stages that take time: stage s commits `cost[s]` after its plan. Returns tokens per target step
// and how many of the drafted tokens were accepted, over the second half of the text.
struct Yield {
  double tokens_per_step, acceptance;
};
Yield run_timed(Chain& chain, const std::vector<u32>& cost, StepPolicy policy) {
  std::vector<std::uint64_t> ready(chain.stages(), 0);
  const u32 target = chain.target();
  const u32 half = (chain.start() + chain.limit()) / 2;
  Counters at_half{};
  u32 length_at_half = 0;
  for (std::uint64_t now = 0; !chain.finished() && chain.good(); ++now) {
    for (u32 s = 0; s <= target; ++s) {
      if (now < ready[s]) continue;
      if (chain.pending(s)) chain.commit(s);
      if (chain.plan(s, policy).query_len > 0) ready[s] = now + cost[s];
    }
    if (length_at_half == 0 && chain.length(target) >= half) {
      at_half = chain.counters(target);
      length_at_half = chain.length(target);
    }
  }
  const Counters& end = chain.counters(target);
  const auto steps = static_cast<double>(end.steps - at_half.steps);
  return {static_cast<double>(chain.length(target) - length_at_half) / steps,
          static_cast<double>(end.accepted - at_half.accepted) /
              static_cast<double>(std::max<std::uint64_t>(1, end.drafted - at_half.drafted))};
}

}  // namespace

TEST(acceptance_recovers_after_corrections) {
  const Truth truth{.seed = 5, .vocabulary = 5000};
  for (u32 stages : {2u, 3u, 4u, 5u}) {
    for (double accuracy : {1.0, 0.95, 0.8}) {
      std::vector<Model> models;
      std::vector<u32> cost;
      for (u32 s = 0; s < stages; ++s) {
        models.push_back({nullptr, s + 1 < stages ? accuracy : 1.0, s % 2});
        cost.push_back(1u << (2 * s));  // each stage four times as slow as the one before
      }
      Chain chain(truth, models, kPrompt, 800);
      const Yield yield = run_timed(chain, cost, policy(64, 31, 0, 64));
      chain.check_text();
      // Each draft token builds on the one before: a wrong one also costs those after it.
      const double floor = accuracy == 1.0 ? 1.0 : accuracy == 0.95 ? 0.75 : 0.5;
      CHECK(yield.acceptance >= floor);
      if (accuracy == 1.0) CHECK(yield.tokens_per_step > (stages == 2 ? 3.9 : 15.0));
      if (accuracy == 0.95) CHECK(yield.tokens_per_step > (stages == 2 ? 2.8 : 4.5));
      if (!CHECK(chain.good())) return;
    }
  }
}

// --- rows --------------------------------------------------------------------------------------

TEST(ports_run_several_rows_of_different_length) {
  for (u32 seed = 0; seed < trials(50, 200); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 3, rows = 1 + random.below(5);
    const fake::Task task(stages, rows, 59, seed);
    fake::BlockMemory memory(stages, rows + 1, 128);  // one row stays unused
    task.reset(memory.block());
    start(memory.block(), 1);
    std::vector<StagePort> ports;
    std::vector<fake::Caches> caches;
    for (u32 s = 0; s < stages; ++s) {
      ports.emplace_back(memory.block(), s, 2 + random.below(8));
      caches.push_back(task.caches(s));
    }
    bool finished = false;
    for (int i = 0; i < 5000 && !finished; ++i) {
      const u32 s = random.below(stages);
      StagePort& port = ports[s];
      const Action action = port.plan(1 + random.below(8), random.below(8), random.below(2));
      if (action == Action::kFinished) finished = true;
      if (action != Action::kStep) continue;  // also kWait: what was planned is planned again
      Tokens selected(rows * port.columns());
      u32 widest = 0;
      for (u32 r = 0; r < rows; ++r) {
        const auto query_len = static_cast<u32>(port.query_lens()[r]);
        const auto num_draft_tokens = static_cast<u32>(port.num_draft_tokens()[r]);
        const auto kv = static_cast<u32>(port.kv()[r]);
        widest = std::max(widest, query_len);
        const bool selects = query_len > 0 && kv + query_len - num_draft_tokens ==
                                                  Sequence(memory.block(), s, r).word().length;
        CHECK_EQ(port.n_select()[r], selects ? query_len : 0);  // nothing while it only catches up
      }
      fake::forward(caches[s], fake::columns_of(port), selected.data(), port.columns());
      CHECK_EQ(widest, port.columns());
      port.commit(selected.data(), port.columns());
    }
    if (!check::in_trial(seed, CHECK(finished) && task.check_text(memory.block()))) return;
  }
}

// A draft reads its lookahead, and the caller raises it before plan() notes the bells.
TEST(a_lookahead_raised_ahead_of_a_plan_ends_the_sleep) {
  fake::BlockMemory memory(2, 1, 16);
  reset(memory.block(), {3}, {16}, {7}, {2});
  set_lookahead(memory.block(), 0, 1);
  StagePort port(memory.block(), 0, 4);
  const u32 lookahead = port.lookahead();
  CHECK_EQ(port.plan(lookahead, 0, 0), Action::kStep);
  const std::int32_t selected[4] = {9, 9, 9, 9};
  CHECK_EQ(port.commit(selected, 4), 1u);
  set_lookahead(memory.block(), 0, 8);
  CHECK_EQ(port.plan(lookahead, 0, 0), Action::kIdle);
  constexpr std::int64_t kMoment = 1000;
  CHECK(port.park(kMoment));
  CHECK_EQ(port.plan(port.lookahead(), 0, 0), Action::kStep);
  CHECK_EQ(port.commit(selected, 4), 1u);
  CHECK(!port.park(kMoment));
}

TEST(arguments_are_checked) {
  fake::BlockMemory memory(2, 2, 16);
  const Block& block = memory.block();
  reset(block, {3, 1}, {18, 16}, {7, 8}, {2});  // 16 positions, the prompt's last token included
  CHECK_THROWS((reset(block, {3}, {19}, {7}, {2}), 0));
  CHECK_THROWS((reset(block, {3}, {2}, {7}, {2}), 0));
  CHECK_THROWS((reset(block, {0}, {4}, {7}, {2}), 0));
  CHECK_THROWS((reset(block, {3, 3, 3}, {5, 5, 5}, {7, 7, 7}, {2}), 0));
  CHECK_THROWS((reset(block, {3, 3}, {5}, {7, 7}, {2}), 0));
  CHECK_THROWS((reset(block, {3}, {5}, {7}, Tokens(kMaxEos + 1, 2)), 0));
  CHECK_THROWS(tokens(block, 1, 0, 2, 4));
  CHECK_THROWS(tokens(block, 1, 0, 3, 2));
  CHECK_EQ(tokens(block, 1, 0, 2, 3), Tokens{7});
  CHECK_THROWS(StagePort(memory.block(), 2, 8));
  CHECK_THROWS(StagePort(memory.block(), 0, 0));
  alignas(kLine) static unsigned char garbage[1024] = {};
  CHECK_THROWS(attach(garbage));
}

// Each part begins at a multiple of the alignment, and no part reaches into the next one.
TEST(parts_of_a_block) {
  for (const u32 alignment : {u32{kLine}, 4096u, 65536u})
    for (const u32 rows : {1u, 7u, 100u})
      for (const u32 stages : {1u, 2u, 16u}) {
        const u32 capacity = 64;
        const std::size_t size = Block::bytes(stages, rows, capacity, alignment);
        std::vector<char> memory(size + alignment);
        char* base = memory.data() +
                     (alignment - reinterpret_cast<std::uintptr_t>(memory.data()) % alignment);
        const Block block = Block::create(base, stages, rows, capacity, alignment);
        CHECK_EQ(block.size(), size);
        CHECK(is_intact(attach(base)));
        const auto at = [&](const auto& word) {
          return static_cast<std::size_t>(reinterpret_cast<const char*>(&word) - base);
        };
        std::size_t end = at(block.control(stages - 1)) + sizeof(StageControl);
        CHECK(at(block.parked(0)) % alignment == 0 && at(block.parked(0)) >= end);
        end = at(block.parked(stages - 1)) + sizeof(Parked);
        for (u32 s = 0; s < stages; ++s) {
          CHECK(at(block.status(s)) % alignment == 0 && at(block.status(s)) >= end);
          CHECK(at(block.published(s, 0)) >= at(block.status(s)) + sizeof(StageStatus));
          CHECK(at(block.priv(s, 0)) >= at(block.published(s, rows - 1)) + sizeof(Published));
          CHECK(at(*block.ring(s, 0)) >= at(block.priv(s, rows - 1)) + sizeof(Private));
          end = at(block.ring(s, rows - 1)[capacity - 1]) + sizeof(std::int32_t);
        }
        CHECK(end <= size);
      }
}

TEST(a_damaged_header_is_noticed) {
  fake::BlockMemory memory(2, 2, 16);
  const Block block = memory.block();
  reset(block, {3, 1}, {18, 16}, {7, 8}, {2});
  CHECK(is_intact(block));
  Header& header = block.header();
  for (u32* word : {&header.stages, &header.rows, &header.capacity, &header.alignment}) {
    for (const u32 garbage : {0u, 1u << 20, ~0u}) {
      const u32 right = *word;
      *word = garbage;
      CHECK(!is_intact(block));
      CHECK_THROWS(attach(memory.base()));
      *word = right;
    }
  }
  header.active_rows = header.n_eos = ~0u;  // a stage finds no more rows and ids than there are
  CHECK_EQ(block.active_rows(), 2u);
  CHECK(!block.is_eos(-5));
  CHECK(is_intact(block));
}

TEST_MAIN()
