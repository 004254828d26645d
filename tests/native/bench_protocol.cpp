// What plan() and commit() of one step cost, per row. Not a test:
//   g++ -std=c++20 -O3 -DNDEBUG -I csrc -I tests/native tests/native/bench_protocol.cpp -o
//   bench_protocol
//
// Two stages run in turns: a draft that is always right and is num_draft_tokens tokens ahead, and
// the target, whose step is timed. "hot": the next step follows at once. "cold": between plan and
// commit, and between two steps, the caches are filled with other data, as a forward does.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "fake_stage.hpp"

using namespace pipespec;
using u32 = std::uint32_t;

namespace {

double now_ns() {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                 std::chrono::steady_clock::now().time_since_epoch())
                                 .count());
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Reads and writes more than the private caches hold.
void forward() {
  static std::vector<std::uint64_t> weights(std::size_t{8} << 20 >> 3, 1);
  for (std::size_t i = 0; i < weights.size(); i += 8) ++weights[i];
  asm volatile("" : : "r"(weights.data()) : "memory");
}

struct Costs {
  double plan, commit, draft;  // ns per row and step; draft: its plan and commit together
};

Costs measure(u32 rows, u32 num_draft_tokens, bool cold) {
  constexpr u32 kLength = 2048, kWidth = 16;
  fake::BlockMemory memory(2, rows, kLength);
  const Block& block = memory.block();
  fake::set_eos(block, {2, 3});
  for (u32 r = 0; r < rows; ++r) reset_row(block, r, 1, kLength, 9);
  const StepPolicy policy{num_draft_tokens, num_draft_tokens, 0, kWidth};
  fake::Tokens tokens(rows * kWidth), selected(rows * kWidth);
  std::vector<Step> steps(rows);
  // The next token is the number of its position, so every draft token is accepted.
  const auto step = [&](u32 stage, double& plan_ns, double& commit_ns) {
    const double begin = now_ns();
    for (u32 r = 0; r < rows; ++r) {
      steps[r] = pipespec::plan(block, stage, r, policy, &tokens[r * kWidth]);
    }
    const double planned = now_ns();
    if (cold) forward();
    for (u32 r = 0; r < rows; ++r) {
      const u32 first = steps[r].kv + steps[r].query_len - steps[r].num_draft_tokens;
      for (u32 j = 0; j <= steps[r].num_draft_tokens; ++j) {
        selected[r * kWidth + j] = static_cast<std::int32_t>(100 + first + j);
      }
    }
    const double computed = now_ns();
    for (u32 r = 0; r < rows; ++r) {
      commit(block, stage, r, steps[r], &tokens[r * kWidth], &selected[r * kWidth]);
    }
    plan_ns = planned - begin;
    commit_ns = now_ns() - computed;
  };
  std::vector<double> plans, commits, drafts;
  double plan_ns = 0, commit_ns = 0;
  while (Sequence(block, 1, rows - 1).word().length + num_draft_tokens + 2 < kLength) {
    for (u32 i = 0; i < num_draft_tokens; ++i) {
      step(0, plan_ns, commit_ns);
      drafts.push_back((plan_ns + commit_ns) / rows);
      if (cold) forward();
    }
    step(1, plan_ns, commit_ns);
    plans.push_back(plan_ns / rows);
    commits.push_back(commit_ns / rows);
    if (cold) forward();
    if (steps[0].num_draft_tokens != num_draft_tokens)
      std::printf("only %u draft tokens\n", steps[0].num_draft_tokens);
  }
  return {median(plans), median(commits), drafts.empty() ? 0 : median(drafts)};
}

}  // namespace

int main() {
  std::vector<double> empty;
  for (int i = 0; i < 1000; ++i) {
    const double begin = now_ns();
    empty.push_back(now_ns() - begin);
  }
  std::printf("median ns per row and step (the clock itself: %.0f ns per call, counted in)\n\n",
              median(empty));
  std::printf("caches  rows  draft tokens |  plan  commit   both | draft, both\n");
  for (const bool cold : {false, true}) {
    for (const u32 rows : {1u, 8u}) {
      for (const u32 num_draft_tokens : {0u, 5u}) {
        const Costs c = measure(rows, num_draft_tokens, cold);
        std::printf("%-6s %5u %6u | %5.0f %7.0f %6.0f | %11.0f\n", cold ? "cold" : "hot", rows,
                    num_draft_tokens, c.plan, c.commit, c.plan + c.commit, c.draft);
      }
    }
  }
}
