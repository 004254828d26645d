// The protocol under real concurrency: litmus tests of what readers may see, sleeping and waking,
// pipelines of threads and of processes. To be run under ThreadSanitizer as well.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "protocol/replicate.hpp"
#include "runtime/stage_port.hpp"
#include "tasks.hpp"

using namespace pipespec;
using check::trials;
using fake::Random;
using fake::Tokens;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
// Far longer than any step here: a thread that sleeps this long was not woken.
constexpr std::int64_t kForever = 60 * kSecond;

void spin(u32 n) {
  while (n-- > 0) asm volatile("");
}

// A random pause: mostly none, sometimes a few hundred instructions, sometimes the time slice.
void dawdle(Random& random) {
  const u32 kind = random.below(16);
  if (kind < 6) {
    spin(random.below(400));
  } else if (kind == 6) {
    std::this_thread::yield();
  } else if (kind == 7) {
    usleep(random.below(60));
  }
}

}  // namespace

// --- litmus tests --------------------------------------------------------------------------------
// Each entry has the writer's steps || the reader's steps, the allowed outcomes, and the reason.
// The numbers are those of test_memory_orders.cpp, which tries every outcome that the orders allow.
// Here the machine chooses. Tokens are atomic, so ThreadSanitizer has nothing to say about them;
// the plain words of `plain`, which are written before a token and read after it, show a missing
// release or acquire.

// L1. Publication.   W: tokens 0..n-1, word = (0, n)   ||   R: word = (0, n), tokens 0..n-1
// Allowed: R reads exactly the tokens that W wrote. Not: older contents of the ring.
// Why: the word is stored with release and loaded with acquire.
TEST(L1_a_reader_that_sees_a_length_sees_its_tokens) {
  constexpr u32 kLength = 4096;
  for (u32 round = 0; round < trials(10, 40); ++round) {
    fake::BlockMemory memory(2, 1, kLength);
    std::fill_n(memory.block().ring(1, 0), kLength, -1);
    std::vector<u32> plain(kLength);
    std::thread writer([&] {
      OwnSequence own(memory.block(), 1, 0);
      Random random{round};
      while (own.length() < kLength) {
        for (u32 i = std::min(1 + random.below(8), kLength - own.length()); i > 0; --i) {
          plain[own.length()] = own.length();
          own.append(static_cast<std::int32_t>(own.length() * 3));
        }
        own.publish();
      }
    });
    const Sequence seen(memory.block(), 1, 0);
    u64 wrong = 0;
    for (u32 length = 0; length < kLength;) {
      const u32 before = length;
      length = seen.word().length;
      wrong += length < before;
      for (u32 p = length < 32 ? 0 : length - 32; p < length; ++p) {
        wrong += seen.token(p) != static_cast<std::int32_t>(p * 3);
        wrong += plain[p] != p;
      }
    }
    writer.join();
    if (!CHECK_EQ(wrong, 0u)) return;
  }
}

// L3. Bell and parked word (Dekker).   W: bell = new, r = parked   ||   S: parked = 1, q = bell
// Allowed: r == 1 (W wakes S), or q == new (S does not sleep), or both.
// Not: r == 0 and q == old: S would sleep though the bell rang. Why: all four are sequentially
// consistent; with acquire and release alone each store could wait in its core's store buffer.
TEST(L3_bell_or_parked_word_is_seen) {
  constexpr u32 kPairs = 2048;  // of bell and parked word; both threads walk along them
  std::vector<StageStatus> status(kPairs);
  std::vector<Parked> parked(kPairs);
  std::vector<u32> seen_parked(kPairs), seen_bell(kPairs);
  u32 lost = 0;
  for (u32 round = 0; round < trials(25, 100); ++round) {
    for (StageStatus& s : status) s.bell = 0;
    for (Parked& p : parked) p.word = 0;
    std::atomic<u32> ready{0};
    const auto both_ready = [&] {
      ready.fetch_add(1);
      while (ready.load() < 2) std::this_thread::yield();
    };
    std::thread publisher([&] {
      both_ready();
      for (u32 i = 0; i < kPairs; ++i) {
        __atomic_store_n(&status[i].bell, 1u, __ATOMIC_SEQ_CST);
        seen_parked[i] = __atomic_load_n(&parked[i].word, __ATOMIC_SEQ_CST);
      }
    });
    both_ready();
    for (u32 i = 0; i < kPairs; ++i) {
      __atomic_store_n(&parked[i].word, 1u, __ATOMIC_SEQ_CST);
      seen_bell[i] = __atomic_load_n(&status[i].bell, __ATOMIC_SEQ_CST);
    }
    publisher.join();
    for (u32 i = 0; i < kPairs; ++i) lost += seen_parked[i] == 0 && seen_bell[i] == 0;
  }
  CHECK_EQ(lost, 0u);
}

// L7, L8. The host shadow.   W: a step, replicate(), ended = n   ||   R: ended = n, word = (e, m)
// of the copy, its tokens, word = (e', m') Allowed: the word of step n or a later one; e' != e, or
// every token is the one of epoch e. Why: L1 and L2 hold in the copy, and `ended` is stored with
// release after it.
TEST(L7_L8_a_step_that_has_ended_is_in_the_host_shadow) {
  constexpr u32 kLength = 64;
  const u32 steps = trials(20'000, 80'000);
  fake::BlockMemory memory(2, 1, kLength), copy(2, 1, kLength);
  for (const fake::BlockMemory* each : {&memory, &copy}) reset_row(each->block(), 0, 1, kLength, 9);
  const auto token_in = [](u32 epoch, u32 p) { return static_cast<std::int32_t>(epoch * 100 + p); };
  std::vector<u32> plain((steps / 4 + 2) * kLength);  // an epoch has five steps or more
  std::vector<u64> words(steps + 1);                  // after each step
  words[0] = pack({0, 1});
  u64 ended = 0;
  std::thread writer([&] {
    Random random{3};
    for (u32 step = 1; step <= steps; ++step) {
      OwnSequence own(memory.block(), 1, 0);
      if (own.length() > 40) own.truncate(1);
      for (u32 n = 1 + random.below(9); n > 0; --n) {
        plain[own.epoch() * kLength + own.length()] = own.length();
        own.append(token_in(own.epoch(), own.length()));
      }
      own.publish();
      words[step] = pack({own.epoch(), own.length()});
      replicate(memory.block(), copy.block(), 1, 0, 1);
      store_release(&ended, u64{step});
    }
  });
  const Sequence seen(copy.block(), 1, 0);
  u64 wrong = 0;
  Tokens read(kLength);
  for (u64 step = 0; step < steps;) {
    step = load_acquire(&ended);
    const Word word = seen.word();
    wrong += pack(word) < words[step];
    for (u32 p = 1; p < word.length; ++p) {
      read[p] = seen.token(p);
      wrong += plain[word.epoch * kLength + p] != p;
    }
    if (!seen.still(word)) continue;
    for (u32 p = 1; p < word.length; ++p) wrong += read[p] != token_in(word.epoch, p);
  }
  writer.join();
  CHECK_EQ(wrong, 0u);
}

// --- sleeping and waking -------------------------------------------------------------------------

namespace {

// Stage `stage` of `stages` waits for its turn and passes it on. Every wait is a park, so one lost
// wake-up costs kForever.
void pass_the_turn(const Block& block, u32 stage, u32 rounds) {
  const u32 stages = block.stages();
  Bells bells(block, stage);
  Random random{stage + 77};
  OwnSequence own(block, stage, 0);
  const Sequence before(block, (stage + stages - 1) % stages, 0);
  for (u32 round = 0; round < rounds; ++round) {
    const u32 turn = stage == 0 ? round : round + 1;
    for (;;) {
      bells.note();
      if (before.word().length >= turn) break;
      const std::int64_t asleep = now_ns();
      bells.park(kForever);
      if (!CHECK(now_ns() - asleep < kForever / 2)) return;  // no thread woke us
    }
    if (round % 16 == 0) dawdle(random);
    own.append(0);
    own.publish();
    bells.ring();
  }
}

}  // namespace

TEST(no_wake_up_is_lost_between_threads) {
  for (u32 stages : {2u, 4u}) {
    fake::BlockMemory memory(stages, 1, 2);
    std::vector<std::thread> threads;
    const u32 rounds = stages == 2 ? trials(25'000, 100'000) : trials(6000, 25'000);
    for (u32 s = 0; s < stages; ++s) {
      threads.emplace_back([&, s] { pass_the_turn(memory.block(), s, rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(Sequence(memory.block(), 0, 0).word().length, rounds);
  }
}

TEST(no_wake_up_is_lost_between_processes) {
  fake::BlockMemory memory(2, 1, 2);
  const u32 rounds = trials(7500, 30'000);
  const pid_t child = fork();
  if (child == 0) {
    check::failures = 0;
    pass_the_turn(memory.block(), 0, rounds);
    _exit(check::failures == 0 ? 0 : 1);
  }
  pass_the_turn(memory.block(), 1, rounds);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}

// Both threads start together, one rings and one parks: without sequential consistency of bell and
// parked word this loses a wake-up. (In the ping-pong above, one of the two is mostly asleep.)
TEST(ring_and_park_at_the_same_instant) {
  fake::BlockMemory memory(2, 1, 2);
  std::atomic<u32> arrived{0};
  const auto line_up = [&](u32 times) {
    arrived.fetch_add(1);
    for (u32 spins = 0; arrived.load() < 2 * times; ++spins) {
      if (spins > 300) std::this_thread::yield();
    }
  };
  std::atomic<bool> over{false};  // read by both between the same two line-ups
  std::thread publisher([&] {
    Bells bells(memory.block(), 1);
    Random random{1};
    for (u32 i = 0; !over; ++i) {
      line_up(2 * i + 1);
      // Reading the sleeper's word keeps it in this core's cache, too, so that the sleeper's store
      // takes longer.
      for (u32 n = random.below(60); n > 0; --n) load_relaxed(&memory.block().parked(0));
      bells.ring();
      line_up(2 * i + 2);
    }
  });
  Bells bells(memory.block(), 0);
  Random random{2};
  // On a busy machine each line-up takes long.
  const std::int64_t end = now_ns() + 3 * kSecond;
  for (u32 i = 0; !over; ++i) {
    bells.note();
    line_up(2 * i + 1);
    spin(random.below(40));
    const std::int64_t asleep = now_ns();
    bells.park(kForever);
    over = !CHECK(now_ns() - asleep < kForever / 2) || i == 50'000 || now_ns() > end;
    line_up(2 * i + 2);
  }
  publisher.join();
}

TEST(parking_ends_with_the_time_and_with_what_rang_before) {
  fake::BlockMemory memory(2, 1, 2);
  Bells own(memory.block(), 0), other(memory.block(), 1);
  own.note();
  std::int64_t begin = now_ns();
  CHECK(!own.park(3'000'000));
  CHECK(now_ns() - begin >= 3'000'000);  // a lower bound holds on a machine of any speed
  CHECK(!own.park(0));
  CHECK(!own.park(-1));
  own.ring();  // its own bell does not wake it
  CHECK(!own.park(1000));
  other.ring();
  begin = now_ns();
  CHECK(own.park(kForever));  // rang after note(): no sleep
  CHECK(own.park(0));
  CHECK(now_ns() - begin < kForever / 2);
  own.note();
  CHECK(!own.park(1000));
  Bells(memory.block(), Bells::kCaller).ring();
  CHECK(own.park(kForever));
}

// The stop may come after a stage has read the generation and before its plan(), which notes the
// bells.
TEST(a_stop_ends_the_sleep) {
  fake::BlockMemory memory(2, 1, 16);
  reset(memory.block(), {1}, {1}, {9}, {});
  for (u32 stage : {0u, 1u}) {  // the target's thread may be another one than the caller's
    start(memory.block(), 7);
    StagePort port(memory.block(), stage, 4);
    CHECK_EQ(port.generation(), 7u);
    start(memory.block(), 0);
    port.plan(4, 4, 0);
    const std::int64_t begin = now_ns();
    CHECK(port.park(kForever));
    CHECK(now_ns() - begin < kForever / 2);
    CHECK_EQ(port.generation(), 0u);
    port.plan(4, 4, 0);
    CHECK(!port.park(1000));
  }
}

// Every publication of a port wakes the others: a commit, and a rollback or adoption of its plan.
TEST(ports_wake_each_other) {
  fake::BlockMemory memory(3, 1, 64);
  reset(memory.block(), {1}, {50}, {9}, {});
  StagePort first(memory.block(), 0, 8), middle(memory.block(), 1, 8), target(memory.block(), 2, 8);
  const Tokens selected(8, 100);
  CHECK_EQ(first.plan(0, 8, 0), Action::kIdle);
  CHECK(!first.park(1000));
  CHECK_EQ(target.plan(0, 8, 0), Action::kStep);
  CHECK(!first.park(1000));  // it has published nothing yet
  target.commit(selected.data(), 8);
  const std::int64_t begin = now_ns();
  CHECK(first.park(kForever));
  CHECK_EQ(first.plan(0, 8, 0), Action::kIdle);
  CHECK_EQ(middle.plan(0, 8, 0), Action::kIdle);  // but it has adopted the target's token
  CHECK(first.park(kForever));
  CHECK(now_ns() - begin < kForever / 2);
  first.plan(0, 8, 0);
  middle.plan(0, 8, 0);  // nothing new
  CHECK(!first.park(1000));
}

// The caller opens and closes a draft's lookahead at any moment; 0 is a sleep that only the caller
// ends, by opening it again or by the stop.
TEST(lookahead_0_is_a_pause) {
  for (u32 round = 0; round < trials(10, 40); ++round) {
    const u32 limit = 400;
    fake::BlockMemory memory(2, 1, fake::power_of_two(limit));
    const Block& block = memory.block();
    reset(block, {1}, {limit}, {9}, {});
    set_lookahead(block, 0, round % 3);
    start(block, 1);
    const auto select = [](StagePort& port) {
      Tokens selected(port.columns());  // the next token is its position
      const auto first =
          static_cast<u32>(port.kv()[0] + port.query_lens()[0] - port.num_draft_tokens()[0]);
      for (u32 j = 0; j < selected.size(); ++j) selected[j] = static_cast<int>(first + j);
      port.commit(selected.data(), port.columns());
    };
    std::thread draft([&] {
      StagePort port(memory.block(), 0, 8);
      while (port.generation() == 1) {
        const std::int64_t asleep = now_ns();
        const u32 lookahead = port.lookahead();
        if (lookahead == 0) {
          port.pause(kForever);
        } else if (port.plan(lookahead, 0, 0) == Action::kStep) {
          select(port);
        } else {
          port.park(kForever);
        }
        if (!CHECK(now_ns() - asleep < kForever / 2)) return;
      }
    });
    StagePort port(memory.block(), 1, 8);
    Random random{round};
    while (port.plan(0, block.control(0).lookahead, 0) == Action::kStep) {
      select(port);
      if (random.below(8) == 0) set_lookahead(block, 0, random.below(3) * random.below(4));
      dawdle(random);
    }
    if (round % 2 == 0) set_lookahead(block, 0, 0);  // the stop finds it asleep, or about to be
    dawdle(random);
    start(block, 0);
    draft.join();
    CHECK_EQ(Sequence(block, 1, 0).word().length, limit);
    CHECK_EQ(fake::tokens_of(block, 1, 0, limit - 1, limit), Tokens{static_cast<int>(limit - 1)});
  }
  fake::BlockMemory memory(2, 1, 8);
  bool refused = false;
  try {
    set_lookahead(memory.block(), 1, 4);  // the target has none
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

// --- pipelines -----------------------------------------------------------------------------------

namespace {

// One stage of a pipeline over several rows, as a driver runs it.
class Worker {
 public:
  Worker(void* base, u32 stage, const fake::Task& task)
      : block_(base), stage_(stage), task_(task), caches_(task.caches(stage)) {}

  // Runs until the generation is over, the target until the text is complete. A stage with
  // `dies_after` stops for good in the middle of that step.
  void run(u32 generation, u64 seed, u32 dies_after = ~0u) {
    Random random{seed * 31 + stage_};
    StagePort port(block_, stage_, 2 + random.below(12));
    u32 steps = 0;
    const std::int64_t began = now_ns();
    while (port.generation() == generation) {
      if (!CHECK(now_ns() - began < kForever)) return;  // no progress
      const u32 lookahead = random.below(4) == 0 ? ~0u : 1 + random.below(12);
      const u32 max_draft_tokens = random.below(10);
      const u32 min_draft_tokens = random.below(2) * random.below(6);
      Action action = port.plan(lookahead, max_draft_tokens, min_draft_tokens);
      if (action == Action::kWait) {
        if (port.park(random.below(200'000)) && random.chance(0.9)) continue;
        action = port.plan(lookahead, max_draft_tokens, 0);  // the deadline has passed
      }
      if (action == Action::kFinished) return;
      if (action == Action::kWait) CHECK(false);
      if (action == Action::kIdle) {
        CHECK(stage_ != block_.target());
        port.park(kForever);
        continue;
      }
      Tokens selected(caches_.size() * port.columns());
      fake::forward(caches_, fake::columns_of(port), selected.data(), port.columns());
      dawdle(random);
      if (++steps > dies_after) return;
      port.commit(selected.data(), port.columns());
    }
  }

  // While no stage runs.
  void check_caches() const { fake::check_caches(block_, stage_, caches_, task_.prompts); }

 private:
  Block block_;
  u32 stage_;
  const fake::Task& task_;
  fake::Caches caches_;
};

// One text per row by threads. `deaths`: the number of steps after which each draft stops.
bool run_threads(const fake::BlockMemory& memory, const fake::Task& task, u32 generation, u64 seed,
                 const std::vector<u32>& deaths) {
  const Block& block = memory.block();
  task.reset(block);
  for (u32 s = 0; s < block.stages(); ++s) store_release(&block.control(s).alive, 1u);
  start(block, generation);
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;
  for (u32 s = 0; s < block.stages(); ++s) {
    workers.push_back(std::make_unique<Worker>(memory.base(), s, task));
  }
  for (u32 s = 0; s < block.stages(); ++s) {
    threads.emplace_back([&, s] {
      workers[s]->run(generation, seed, deaths[s]);
      if (deaths[s] != ~0u && seed % 3 != 0) {  // in the other cases no stage notices the death
        store_release(&block.control(s).alive, 0u);
      }
    });
  }
  threads.back().join();
  const std::int64_t stopped = now_ns();
  start(block, 0);
  for (u32 s = 0; s + 1 < block.stages(); ++s) threads[s].join();
  bool good = CHECK(now_ns() - stopped < kForever / 2);
  good = task.check_text(block) && good;
  for (const auto& worker : workers) worker->check_caches();
  return good && check::failures == 0;
}

}  // namespace

TEST(threads_give_the_plain_text) {
  for (u32 seed = 0; seed < trials(60, 240); ++seed) {
    Random random{seed};
    const u32 stages = 2 + seed % 4, rows = 1 + random.below(4);
    const fake::Task task(stages, rows, 240, seed);
    fake::BlockMemory memory(stages, rows, 256);
    if (!check::in_trial(seed, run_threads(memory, task, 1, seed, std::vector<u32>(stages, ~0u))))
      return;
  }
}

TEST(drafts_die_at_any_moment_and_the_next_text_starts_clean) {
  fake::BlockMemory memory(4, 3, 256);
  for (u32 seed = 0; seed < trials(30, 120); ++seed) {
    Random random{seed + 1000};
    const fake::Task task(4, 3, 190, seed + 1000);
    std::vector<u32> deaths(4, ~0u);
    for (u32 s = 0; s < 3; ++s) {
      if (random.chance(0.5)) deaths[s] = random.below(random.pick({3u, 100u}));
    }
    if (!check::in_trial(seed, run_threads(memory, task, seed + 1, seed, deaths))) return;
  }
}

// Drafts in processes of their own; some are killed, without warning, at any instruction.
TEST(processes_give_the_plain_text_also_when_killed) {
  for (u32 seed = 0; seed < trials(10, 40); ++seed) {
    Random random{seed + 9000};
    constexpr u32 kStages = 3;
    const fake::Task task(kStages, 2, 240, seed + 9000);
    fake::BlockMemory memory(kStages, 2, 256);
    const Block& block = memory.block();
    task.reset(block);
    start(block, 1);
    pid_t children[kStages - 1];
    for (u32 s = 0; s + 1 < kStages; ++s) {
      children[s] = fork();
      if (children[s] == 0) {
        check::failures = 0;
        Worker(memory.base(), s, task).run(1, seed);
        _exit(check::failures == 0 ? 0 : 1);
      }
    }
    const bool kills = seed % 2 == 1;
    std::thread killer([&, delay = random.below(4000)] {
      if (!kills) return;
      usleep(delay);
      for (const pid_t child : children) kill(child, SIGKILL);
      for (u32 s = 0; s + 1 < kStages; ++s) store_release(&block.control(s).alive, 0u);
    });
    Worker target(memory.base(), kStages - 1, task);
    target.run(1, seed);
    start(block, 0);
    killer.join();
    for (const pid_t child : children) {
      int status = -1;
      waitpid(child, &status, 0);
      CHECK(status == 0 || (kills && WIFSIGNALED(status)));
    }
    target.check_caches();
    if (!task.check_text(block)) return;
  }
}

TEST_MAIN()
