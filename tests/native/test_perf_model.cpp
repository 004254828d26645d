// The perf model: exact results for chains with a known answer, random ones within their sampling
// error, and errors for settings that make no sense.
#include <cmath>
#include <limits>

#include "check.hpp"
#include "runtime/perf_model.hpp"

using namespace pipespec::perf;
using u32 = std::uint32_t;

namespace {

// Stages with one step time each.
Setting chain(std::vector<double> steps, std::vector<double> acceptance, u32 tokens = 20000) {
  Setting setting;
  for (u32 s = 0; s < steps.size(); ++s) {
    StageModel stage;
    stage.step_s = {steps[s]};
    stage.lookahead = 60;
    stage.max_draft_tokens = s > 0 ? 60 : 0;
    setting.stages.push_back(stage);
  }
  setting.answers.acceptance = std::move(acceptance);
  setting.tokens = tokens;
  setting.lookahead = 8;
  return setting;
}

double tokens_per_step(const Result& result) {
  return static_cast<double>(result.tokens) / static_cast<double>(result.stages.back().steps);
}

bool near(double value, double expected, double tolerance) {
  if (std::abs(value - expected) <= tolerance) return true;
  std::fprintf(stderr, "%g is not within %g of %g\n", value, tolerance, expected);
  return false;
}

// Steady state of a chain that verifies g drafts or decodes one token (published form).
double published(double a, double g) {
  const double rho = a / (1 - std::pow(a, g + 1) + a);
  return 1 - rho + rho * (1 - std::pow(a, g + 1)) / (1 - a);
}

}  // namespace

TEST(a_chain_of_one_is_plain_decoding) {
  Setting setting = chain({0.5}, {});
  setting.tokens = 100;
  setting.stages[0].start_s = 3.0;
  const Result result = asynchronous(setting);
  CHECK_EQ(result.seconds, 53.0);
  CHECK_EQ(result.stages[0].steps, 100u);
}

TEST(useless_drafts_cost_nothing_on_a_device_of_their_own) {
  for (const double a : {0.0, 1e-12}) {
    const Result result = asynchronous(chain({1, 4, 20}, {0.9, a}, 500));
    CHECK_EQ(result.seconds, 500.0 * 20);
    CHECK_EQ(result.stages[2].accepted, 0u);
  }
}

TEST(perfect_drafts_are_bound_by_the_smallest_one) {
  // c drafts per target step, all of them right: the draft's own speed.
  const Result result = asynchronous(chain({1, 4, 20}, {1, 1}, 20000));
  CHECK(near(result.seconds / 20000, 1.0, 0.01));
  for (const StageResult& stage : result.stages) CHECK_EQ(stage.rollbacks, 0u);
}

TEST(the_published_chain_comes_out_where_its_assumptions_hold) {
  for (const double a : {0.3, 0.7, 0.9}) {
    for (const u32 c : {2u, 5u, 10u}) {
      Setting setting = chain({1.0, static_cast<double>(c)}, {a}, 60000);
      setting.preempt = true;
      const double expected = published(a, c - 1);
      // Standard deviation of the tokens of a step is at most about the mean.
      CHECK(near(tokens_per_step(asynchronous(setting)), expected, 4 * expected * expected / 245));
    }
  }
}

TEST(the_same_seed_gives_the_same_run) {
  Setting setting = chain({1.1, 4.3, 21.7}, {0.8, 0.8}, 2000);
  setting.stages[2].min_draft_tokens = 3;
  using Function = Result (*)(const Setting&);
  for (const Function f :
       {Function{asynchronous}, Function{reference_async}, Function{reference_sync}}) {
    setting.seed = 7;
    const Result first = f(setting);
    CHECK_EQ(f(setting).seconds, first.seconds);
    CHECK_EQ(f(setting).stages[0].steps, first.stages[0].steps);
    CHECK(first.stages[0].rollbacks > 0);
    setting.seed = 8;
    CHECK(f(setting).seconds != first.seconds);
  }
}

TEST(a_replayed_text_is_the_text) {
  // Wrong at every fifth position: each round of the target accepts four drafts and corrects one.
  Setting setting = chain({1.0, 5.0}, {}, 1000);
  for (u32 p = 0; p < 1000; ++p) setting.answers.table.push_back(p % 5 == 4);
  setting.stages[0].lookahead = setting.stages[1].max_draft_tokens = 9;
  const Result reference = reference_sync(setting);
  CHECK_EQ(reference.stages[1].accepted, 799u);  // its first token comes from the prefill
}

TEST(answers_that_agree_with_each_other_are_seen_to_agree) {
  // Both drafts wrong everywhere: with one wrong token the middle stage accepts everything it gets,
  // with different ones it accepts nothing. The target accepts nothing in both cases.
  for (const std::uint8_t small : {1, 2}) {
    Setting setting = chain({1, 4, 20}, {}, 2000);
    setting.answers.table = {small, 1};
    const Result result = asynchronous(setting);
    CHECK_EQ(result.stages[2].accepted, 0u);
    if (small == 1) {
      CHECK_EQ(result.stages[1].accepted, result.stages[1].drafted);
      CHECK(result.stages[1].drafted > 1000);
    } else {
      CHECK_EQ(result.stages[1].accepted, 0u);
    }
  }
}

TEST(a_wait_ends_at_its_deadline) {
  // The draft proposes nothing: it starts after the target has ended.
  Setting setting = chain({1, 10}, {0.8}, 10);
  setting.stages[0].start_s = 1e9;
  setting.stages[1].min_draft_tokens = 4;
  setting.patience = 1.5;
  // 1.5 * 4 steps of the draft before each step but the last, which has no place for a draft token;
  // then fewer than four drafts are possible, and the deadline is still that of four.
  CHECK_EQ(asynchronous(setting).seconds, 10 * 10 + 9 * 1.5 * 4);
}

TEST(spd_follows_its_law) {
  for (const u32 n : {1u, 2u, 4u, 8u}) {
    for (const double a : {0.0, 0.5, 0.8, 1.0}) {
      SpdSetting setting;
      setting.stage_s.assign(n, 1.0);
      setting.acceptance = a;
      setting.tokens = 40000;
      const SpdResult result = spd(setting);
      const double rate = 40000 / static_cast<double>(result.cycles);
      const double law = 1 / (n * (1 - a) + a);
      CHECK(near(rate, law, 4 * n * std::sqrt(a * (1 - a) / 40000) * law + 1e-3));
      CHECK_EQ(result.seconds, static_cast<double>(result.cycles));
      setting.shared = true;  // one device reads all weights in every full cycle
      CHECK(spd(setting).seconds >= 40000.0);
    }
  }
}

TEST(nonsense_is_refused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double a : {-0.1, 1.1, nan}) CHECK_THROWS(asynchronous(chain({1, 2}, {a})));
  for (const double t : {0.0, -1.0, nan, HUGE_VAL})
    CHECK_THROWS(asynchronous(chain({t, 2}, {0.5})));
  CHECK_THROWS(asynchronous(chain({1, 2}, {0.5, 0.5})));
  CHECK_THROWS(asynchronous(chain({}, {})));
  CHECK_THROWS(asynchronous(chain({1, 2}, {0.5}, 0)));
  CHECK_THROWS(reference_async(chain({1}, {})));
  Setting both = chain({1, 2}, {0.5});
  both.answers.table = {0};
  CHECK_THROWS(asynchronous(both));
  Setting ragged = chain({1, 2, 3}, {});
  ragged.answers.table = {0, 1, 0};
  CHECK_THROWS(asynchronous(ragged));
  Setting stuck = chain({1, 2}, {0.5});
  stuck.stages[1].min_draft_tokens = 8;  // more than the draft's lookahead lets it be ahead
  stuck.stages[1].max_draft_tokens = 8;
  stuck.stages[0].lookahead = 4;
  stuck.patience = HUGE_VAL;
  CHECK_THROWS(asynchronous(stuck));
  SpdSetting empty;
  CHECK_THROWS(spd(empty));
}

TEST_MAIN()
