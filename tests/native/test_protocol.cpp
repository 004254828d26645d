// What the protocol promises without a schedule: drafts recover after corrections, and sizes and
// arguments are checked. That each plan feeds what the rules say is in
// tests/kernels/test_state_histories.py; texts, caches, waits, ends and limits in every order of
// steps are in test_simulation.cpp.
#include <cstdio>

#include "runtime/stage_port.hpp"
#include "tasks.hpp"

using namespace pipespec;
using fake::Tokens;
using u32 = std::uint32_t;

namespace {

// Stages that take time: stage s commits `cost[s]` after its plan. Returns tokens per target step
// and how many of the drafted tokens were accepted, over the second half of the text.
struct Yield {
  double tokens_per_step, acceptance;
};
Yield run_timed(const fake::Task& task, const std::vector<u32>& cost) {
  constexpr u32 kLookahead = 64, kMaxDraftTokens = 31, kWidth = 64;
  const u32 stages = task.stages(), target = stages - 1;
  fake::BlockMemory memory(stages, 1, fake::power_of_two(task.limits[0] + 1));
  const Block& block = memory.block();
  task.reset(block);
  std::vector<StagePort> ports;
  std::vector<fake::Caches> caches;
  for (u32 s = 0; s < stages; ++s) {
    ports.emplace_back(block, s, kWidth);
    caches.push_back(task.caches(s));
  }
  const Counters& counters = block.priv(target, 0).counters;
  const Sequence text(block, target, 0);
  std::vector<std::uint64_t> ready(stages, 0);
  std::vector<Tokens> selected(stages);
  Counters at_half{};
  u32 length_at_half = 0;
  Action of_target = Action::kIdle;
  for (std::uint64_t now = 0; of_target != Action::kFinished; ++now) {
    for (u32 s = 0; s < stages; ++s) {
      if (now < ready[s]) continue;
      StagePort& port = ports[s];
      if (!selected[s].empty()) port.commit(selected[s].data(), port.columns());
      selected[s].clear();
      const Action action = port.plan(kLookahead, kMaxDraftTokens, 0);
      if (s == target) of_target = action;
      if (action != Action::kStep) continue;
      selected[s].resize(port.columns());
      fake::forward(caches[s], fake::columns_of(port), selected[s].data(), port.columns());
      ready[s] = now + cost[s];
    }
    if (length_at_half == 0 && text.word().length >= task.limits[0] / 2) {
      at_half = counters;
      length_at_half = text.word().length;
    }
  }
  task.check_text(block);
  const auto steps = static_cast<double>(counters.steps - at_half.steps);
  return {static_cast<double>(text.word().length - length_at_half) / steps,
          static_cast<double>(counters.accepted - at_half.accepted) /
              static_cast<double>(std::max<std::uint64_t>(1, counters.drafted - at_half.drafted))};
}

}  // namespace

TEST(acceptance_recovers_after_corrections) {
  for (u32 stages : {2u, 3u, 4u, 5u}) {
    for (double accuracy : {1.0, 0.95, 0.8}) {
      fake::Task task(stages, 1, 1, 5);
      task.truth.eos_rate = 0;
      task.truth.vocabulary = 5000;
      task.limits[0] = 800;
      std::vector<u32> cost;
      for (u32 s = 0; s < stages; ++s) {
        task.models[s] = {&task.truth, s + 1 < stages ? accuracy : 1.0, s % 2};
        cost.push_back(1u << (2 * s));  // each stage four times as slow as the one before
      }
      const Yield yield = run_timed(task, cost);
      // Each draft token builds on the one before: a wrong one also costs those after it.
      const double floor = accuracy == 1.0 ? 1.0 : accuracy == 0.95 ? 0.75 : 0.5;
      CHECK(yield.acceptance >= floor);
      if (accuracy == 1.0) CHECK(yield.tokens_per_step > (stages == 2 ? 3.9 : 15.0));
      if (accuracy == 0.95) CHECK(yield.tokens_per_step > (stages == 2 ? 2.8 : 4.5));
    }
  }
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
