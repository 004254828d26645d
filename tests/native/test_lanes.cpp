// Several lanes that walk along a row together give the result of one lane. The lanes are threads,
// so ThreadSanitizer reports a lane that reads a value before another lane has handed it over.
#include <array>
#include <barrier>
#include <cstring>
#include <string>
#include <thread>

#include "check.hpp"
#include "fake_stage.hpp"
#include "protocol/commit.hpp"
#include "protocol/litmus.hpp"
#include "protocol/replicate.hpp"
#include "runtime/generation.hpp"

using namespace pipespec;
using check::trials;
using fake::Random;
using fake::Tokens;
using u32 = std::uint32_t;

namespace {

constexpr u32 kLanes = 4;

// The values that the lanes of one row exchange.
struct Team {
  std::barrier<> meet{kLanes};
  std::array<std::uint64_t, kLanes> said{};
};

// As the intrinsics of a warp.
class Lane {
 public:
  static constexpr u32 kCount = kLanes;
  Lane(Team& team, u32 index) : team_(team), index_(index) {}
  u32 index() const { return index_; }
  void sync() const { team_.meet.arrive_and_wait(); }
  u32 ballot(bool yes) const {
    u32 bits = 0;
    const auto& said = exchange(yes);
    for (u32 i = 0; i < kLanes; ++i) bits |= static_cast<u32>(said[i]) << i;
    sync();
    return bits;
  }
  u32 sum(u32 n) const {
    u32 sum = 0;
    for (const std::uint64_t said : exchange(n)) sum += static_cast<u32>(said);
    sync();
    return sum;
  }
  template <typename Work>
  auto once(const Work& work) const {
    sync();
    if constexpr (std::is_void_v<decltype(work())>) {
      if (index_ == 0) work();
      sync();
    } else {
      if (index_ == 0) team_.said[0] = static_cast<std::uint64_t>(work());
      sync();
      const auto result = static_cast<decltype(work())>(team_.said[0]);
      sync();
      return result;
    }
  }

 private:
  const std::array<std::uint64_t, kLanes>& exchange(std::uint64_t value) const {
    team_.said[index_] = value;
    sync();
    return team_.said;
  }

  Team& team_;
  u32 index_;
};

// All lanes run `body`. Returns what it returned, the same in each of them.
template <typename Body>
auto together(const Body& body) {
  Team team;
  std::array<decltype(body(Lane(team, 0))), kLanes> results;
  std::vector<std::thread> threads;
  for (u32 i = 0; i < kLanes; ++i)
    threads.emplace_back([&, i] { results[i] = body(Lane(team, i)); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) CHECK(std::memcmp(&result, &results[0], sizeof result) == 0);
  return results[0];
}

std::string bytes(const fake::BlockMemory& memory) {
  return {static_cast<const char*>(memory.base()), memory.block().header().bytes};
}

}  // namespace

// Random walks of a chain, in one block by one lane and in another by several.
TEST(lanes_do_what_one_lane_does) {
  u32 rollbacks = 0, accepted = 0;
  for (u32 seed = 0; seed < trials(6, 40); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 3;
    fake::Truth truth;
    truth.seed = seed;
    truth.eos = {2};
    truth.eos_rate = 0.002;
    std::vector<fake::Cache> caches;
    const Tokens prompt{5, 6, 7};
    for (u32 s = 0; s < stages; ++s) {
      fake::Model model{&truth, s + 1 == stages ? 1.0 : 0.8};
      model.seed = s;
      caches.emplace_back(model).prefill(prompt);
    }
    fake::BlockMemory one(stages, 1, 128), several(stages, 1, 128);
    fake::BlockMemory shadow_of_one(stages, 1, 128), shadow_of_several(stages, 1, 128);
    for (const auto* memory : {&one, &several, &shadow_of_one, &shadow_of_several})
      reset(memory->block(), {3}, {100}, {7}, truth.eos);
    for (u32 i = 0; i < 60; ++i) {
      const u32 stage = random.below(stages), width = random.pick({1u, 5u, 16u});
      const StepPolicy policy{random.pick({2u, 9u, ~0u}), random.below(12), random.below(3), width};
      Tokens tokens(width, -7), same(width, -7), selected(width, -1);
      const Step step = plan(one.block(), stage, 0, policy, tokens.data());
      const Step of_lanes = together([&](const Lane& lane) {
        return plan(several.block(), stage, 0, policy, same.data(), lane);
      });
      if (!CHECK(std::memcmp(&step, &of_lanes, sizeof step) == 0) || !CHECK_EQ(tokens, same))
        return;
      if (step.query_len > 0) {
        caches[stage].feed(tokens.data(), step.kv, step.query_len, width);
        caches[stage].select(tokens.data(), step.kv,
                             step.action == Action::kStep ? step.query_len : 0,
                             step.num_draft_tokens, selected.data(), width);
      }
      const u32 produced = commit(one.block(), stage, 0, step, tokens.data(), selected.data());
      CHECK_EQ(produced, together([&](const Lane& lane) {
                 return commit(several.block(), stage, 0, step, tokens.data(), selected.data(),
                               lane);
               }));
      if (random.chance(0.5)) {
        replicate(one.block(), shadow_of_one.block(), stage, 0, 1);
        together([&](const Lane& lane) {
          replicate(several.block(), shadow_of_several.block(), stage, 0, 1, lane);
          return 0;
        });
      }
      if (!CHECK(bytes(one) == bytes(several)) ||
          !CHECK(bytes(shadow_of_one) == bytes(shadow_of_several)))
        return;
    }
    for (u32 s = 0; s < stages; ++s) {
      rollbacks += static_cast<u32>(one.block().priv(s, 0).counters.rollbacks);
      accepted += static_cast<u32>(one.block().priv(s, 0).counters.accepted);
    }
  }
  CHECK(rollbacks > 5 && accepted > 50);  // otherwise the walks were too simple
}

// More rows than lanes, and rows that have nothing new.
TEST(lanes_copy_all_rows) {
  constexpr u32 kRows = 2 * kLanes + 1;
  fake::BlockMemory memory(1, kRows, 32), copy(1, kRows, 32);
  for (const auto* each : {&memory, &copy})
    reset(each->block(), std::vector<u32>(kRows, 1), std::vector<u32>(kRows, 32), Tokens(kRows, 7),
          {});
  Random random{1};
  for (u32 i = 0; i < 20; ++i) {
    for (u32 row = 0; row < kRows; ++row) {
      OwnSequence own(memory.block(), 0, row);
      if (random.chance(0.3)) own.truncate(1 + random.below(own.length()));
      for (u32 n = random.below(4); n > 0 && own.length() < 32; --n)
        own.append(static_cast<std::int32_t>(random.below(1000)));
      own.publish();
    }
    together([&](const Lane& lane) {
      replicate(memory.block(), copy.block(), 0, 0, kRows, lane);
      return 0;
    });
    for (u32 row = 0; row < kRows; ++row) {
      const Word word = Sequence(memory.block(), 0, row).word();
      if (!CHECK_EQ(pack(word), pack(Sequence(copy.block(), 0, row).word())) ||
          !CHECK_EQ(fake::tokens_of(memory.block(), 0, row, 1, word.length),
                    fake::tokens_of(copy.block(), 0, row, 1, word.length)))
        return;
    }
  }
}

TEST(lanes_write_and_read_the_litmus_sequence) {
  fake::BlockMemory memory(2, 1, 64);
  reset(memory.block(), {1}, {51}, {7}, {});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    together([&](const Lane& lane) {
      litmus_write(memory.block(), 1, 0, trials(20, 100), 50, lane);
      return 0;
    });
    done = true;
  });
  u32 wrong = 0;
  while (!done)
    wrong += static_cast<u32>(together([&](const Lane& lane) {
                                return litmus_read(memory.block(), 1, 0, 3, lane);
                              }).wrong);
  writer.join();
  const LitmusCount last =
      together([&](const Lane& lane) { return litmus_read(memory.block(), 1, 0, 3, lane); });
  CHECK_EQ(last.tokens, 3u * 50);
  CHECK_EQ(wrong + last.wrong, 0u);
}

TEST_MAIN()
