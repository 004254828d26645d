// The protocol under a deterministic scheduler (simulated_memory.hpp): stages, the caller and an
// observer change at every access, loads give old values, drafts crash at any access or write
// garbage, the caller stops and restarts everything. Stages sleep on their bells. Each schedule is
// a function of one seed:
//
//   test_simulation --seed 17                     replays it and prints its last accesses
//   test_simulation --seed 17 no_release_fence    the same with a fault of the memory
//
// Checked at every store and after every half step, against what the schedule's models say. When
// the drafts come to rest they must agree with the target and stand where their bounds let them.
#define pipespec pipespec_simulated  // no inline function of ours stands in for one of the core
#define PIPESPEC_MEMORY "../tests/native/simulated_memory.hpp"
#include <linux/futex.h>
#include <sys/syscall.h>

#include <chrono>
#include <memory>
#include <optional>

#include "check.hpp"
#include "fake_stage.hpp"
#include "protocol/replicate.hpp"

// The bells are of the simulated memory, too, and a futex ends a turn of its thread.
#define __atomic_load_n(p, order) ::simulated::load_newest(p)
#define __atomic_store_n(p, value, order) ::simulated::store_newest(p, value)
#define syscall(number, p, operation, value, timeout, ...) \
  ::simulated::futex(machine(), p, (operation) == FUTEX_WAIT, value, timeout)
static simulated::Machine& machine();
#include "runtime/generation.hpp"
#include "runtime/stage_port.hpp"
#undef __atomic_load_n
#undef __atomic_store_n
#undef syscall

using namespace pipespec;
using check::trials;
using fake::Model;
using fake::Tokens;
using fake::Truth;
using simulated::Fault, simulated::Kind, simulated::Machine, simulated::Place, simulated::Random;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

namespace {

constexpr u32 kStages = Machine::kStages, kRows = Machine::kRows, kCapacity = 16, kPrompt = 4;
constexpr u32 kWidth = 12, kPositions = 64;
constexpr u32 kCaller = kStages, kObserver = kStages + 1;
constexpr std::int32_t kGarbage = -1000;

// What the schedules had in them.
struct Coverage {
  u64 schedules = 0, accesses = 0, stale = 0, generations = 0, stops = 0, ended_rows = 0;
  u64 crashes = 0, corrupt = 0, restarts = 0, rests = 0, waits = 0, parks = 0, tokens = 0,
      rollbacks = 0;
  u64 observed = 0, torn = 0, copies = 0, batches = 0, eos = 0;
  u64 stages[kStages + 1] = {};
};

// A row of a stage's KV storage: each entry is the token that it was computed from.
struct Cache {
  std::array<std::int32_t, kPositions> entries;
};

// What a stage has published, by its stores alone.
struct Ghost {
  Word word;
  u32 committed;
  u32 written;  // bit i: entry i of the ring, since the last publication
  std::vector<std::array<std::int32_t, kCapacity>> epochs;  // the ring at the end of each epoch
};

class Simulation final : public simulated::Watch {
 public:
  Simulation() {
    arena_bytes_ = 2 * align(Block::bytes(kStages, kRows, kCapacity));
    arena_ = ::operator new(arena_bytes_, std::align_val_t{kLine});
    machine_.emplace(arena_, arena_bytes_);
    running = this;
  }
  ~Simulation() { ::operator delete(arena_, std::align_val_t{kLine}); }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Whether everything held. Else failure() says what did not.
  bool run(u64 seed, Fault fault = Fault::kNone, bool tracing = false) {
    failure_.clear();
    random_ = {fake::mix(seed + 1)};
    machine_->begin(random_.next(), *this);
    machine_->set_fault(fault);
    machine_->set_tracing(tracing);
    lay_out();
    const u32 generations = random_.chance(60) ? 1 : 2 + random_.below(2);
    for (u32 g = 1; g <= generations && failure_.empty(); ++g) generation(g);
    ++coverage.schedules;
    coverage.accesses += machine_->accesses;
    coverage.stale += machine_->stale_loads;
    ++coverage.stages[stages_];
    coverage.batches += rows_ > 1;
    coverage.copies += copies_;
    return failure_.empty();
  }
  const std::string& failure() const { return failure_; }
  void print_trace() const { machine_->print_trace(); }

  Machine& machine() { return *machine_; }

  Coverage coverage;

 private:
  static constexpr std::size_t align(std::size_t n) { return (n + kLine - 1) / kLine * kLine; }

  // --- the host: a schedule ----------------------------------------------------------------------

  void lay_out() {
    stages_ = 2 + random_.below(kStages - 1);
    rows_ = random_.pick({1u, 1u, 2u, 3u});
    const u32 capacity = random_.pick({8u, 16u});
    mask_ = capacity - 1;
    copies_ = random_.chance(25);
    const std::size_t bytes = align(Block::bytes(stages_, rows_, capacity));
    std::memset(arena_, 0, 2 * bytes);
    block_ = Block::create(arena_, stages_, rows_, capacity);
    copy_ = Block::create(static_cast<char*>(arena_) + bytes, stages_, rows_, capacity);
    name(block_, false);
    if (copies_) name(copy_, true);
    truth_.eos = {3, 2};
    for (u32 s = 0; s < stages_; ++s) is_lost_[s] = true;
  }
  void name(const Block& block, bool copy) {
    if (!copy) {
      machine_->name(&block.header().generation, {Kind::kGeneration});
      machine_->name(&block.header().bell, {Kind::kBell});
    }
    for (std::uint8_t row = 0; row < rows_; ++row) {
      if (!copy) machine_->name(&block.span(row).limit, {Kind::kLimit, copy, 0, row});
      for (std::uint8_t s = 0; s < stages_; ++s) {
        machine_->name(&block.published(s, row).word, {Kind::kWord, copy, s, row});
        machine_->name(&block.published(s, row).committed, {Kind::kCommitted, copy, s, row});
        for (std::uint8_t i = 0; i <= mask_; ++i)
          machine_->name(block.ring(s, row) + i, {Kind::kToken, copy, s, row, i});
      }
    }
    for (std::uint8_t s = 0; s < stages_ && !copy; ++s) {
      machine_->name(&block.control(s).alive, {Kind::kAlive, copy, s});
      machine_->name(&block.control(s).lookahead, {Kind::kLookahead, copy, s});
      machine_->name(&block.status(s).bell, {Kind::kBell, copy, s});
      machine_->name(&block.parked(s), {Kind::kParked, copy, s});
    }
  }

  // As a driver does it: restart what is lost, reset the rows, start, run, stop, wait for the end.
  void generation(u32 number) {
    ++coverage.generations;
    number_ = number;
    models();
    std::vector<u32> starts, limits;
    std::vector<std::int32_t> last;
    for (u32 r = 0; r < rows_; ++r) {
      starts.push_back(1 + random_.below(kPrompt));
      limits.push_back(starts[r] + random_.below(mask_ + 1));
      for (u32 i = 0; i < starts[r]; ++i) text_[r][i] = static_cast<std::int32_t>(random_.below(9));
      last.push_back(text_[r][starts[r] - 1]);
      text_length_[r] = starts[r];
      write_text(r, starts[r], limits[r]);
    }
    for (u32 s = 0; s < stages_; ++s) {
      const bool starts_now = !is_lost_[s] || number == 1 || s == target() || random_.chance(80);
      coverage.restarts += is_lost_[s] && starts_now && number > 1;
      is_here_[s] = starts_now;
      is_corrupt_[s] = is_lost_[s] = is_ringing_[s] = false;
      block_.control(s).alive = starts_now;
      block_.control(s).lookahead = random_.pick({1u, 2u, 3u, 5u, 8u, ~0u});
      if (random_.chance(5)) block_.control(s).lookahead = 0;
    }
    pipespec::reset(block_, starts, limits, last, truth_.eos);
    if (copies_)
      std::memcpy(&copy_.header(), &block_.header(), Block::bytes(stages_, rows_, mask_ + 1));
    pipespec::start(block_, number);
    for (u32 r = 0; r < rows_; ++r) {
      start_[r] = starts[r];
      limit_[r] = limits[r];
      is_ended_[r] = false;
      for (u32 s = 0; s < stages_; ++s) {
        Ghost& ghost = ghosts_[s][r];
        ghost.word = {0, starts[r]};
        ghost.committed = starts[r];
        ghost.written = 0;
        ghost.epochs.resize(1);
        for (u32 i = 0; i <= mask_; ++i) ghost.epochs[0][i] = block_.ring(s, r)[i];
        auto& entries = caches_[s][r].entries;
        entries.fill(kGarbage);
        std::copy_n(text_[r].begin(), starts[r] - 1, entries.begin());
      }
    }
    machine_->settle();
    start_threads();
    play();
  }

  void models() {
    truth_.seed = random_.next();
    truth_.vocabulary = random_.pick({2, 5, 40});
    truth_.eos_rate = random_.pick({0.0, 0.0, 0.03, 0.15});
    for (u32 s = 0; s < stages_; ++s)
      models_[s] = {&truth_, s == target() ? 1.0 : random_.pick({0.0, 0.6, 0.9, 1.0}),
                    random_.below(3)};
  }
  void write_text(u32 row, u32 start, u32 limit) {
    u64 hash = Truth::hash_of(text_[row].data(), start);
    u32 n = start;
    while (n < limit) {
      text_[row][n] = truth_.next(hash);
      hash = fake::extend(hash, text_[row][n++]);
      if (is_eos(text_[row][n - 1])) break;
    }
    text_length_[row] = n;
  }

  void start_threads() {
    const bool in_order = random_.chance(20);  // no load of an old value
    const u32 staleness = random_.pick({10u, 50u, 90u});
    live_ = 0;
    min_draft_tokens_ = random_.pick({0u, 0u, 1u, 3u});
    max_draft_tokens_ = random_.pick({0u, 1u, 3u, 8u, 8u});
    width_ = random_.pick({1u, 2u, 3u, 5u, 12u});
    is_changing_ = random_.chance(25);
    fails_percent_ = random_.pick({0u, 0u, 10u});
    has_deadline_ = true;
    is_stopping_ = is_finished_ = is_calm_ = false;
    machine_->set_mean_slice(random_.pick({1u, 1u, 2u, 5u, 30u}));
    machine_->set_swaps(random_.chance(50));
    const u32 crashing = random_.pick({0u, 20u, 60u});
    for (u32 s = 0; s < stages_; ++s) {
      if (!is_here_[s]) continue;
      ports_[s].emplace(block_, s, width_);
      machine_->start(s, [] { running->stage(running->machine_->current()); });
      Machine::Thread& t = machine_->thread(s);
      t.weight = random_.pick({1u, 3u, 3u, 20u, 500u});
      t.stale_percent = in_order ? 0 : random_.pick({0u, staleness, staleness});
      pause_[s] = random_.pick({0u, 0u, 0u, 10u, 300u, 3000u});
      live_ |= 1u << s;
      becomes_corrupt_[s] = false;
      if (s == target() || !random_.chance(crashing)) continue;
      t.crashes_in = random_.below(random_.pick({100u, 300u, 1000u}));
      becomes_corrupt_[s] = random_.chance(30);
    }
    if (random_.chance(60)) {
      machine_->start(kCaller, [] { running->caller(); });
      machine_->thread(kCaller).stale_percent = in_order ? 0 : staleness;
    }
    if (random_.chance(50)) {
      machine_->start(kObserver, [] { running->observer(); });
      machine_->thread(kObserver).weight = random_.pick({1u, 3u});
      machine_->thread(kObserver).stale_percent = in_order ? 0 : 50;
    }
  }

  void play() {
    constexpr u32 kAll = ~0u;
    // Anything may happen.
    machine_->set_fresh(false);
    machine_->run(kAll, random_.pick({100u, 1000u, 5000u, 50'000u}));
    // From here on stores arrive, and nothing crashes any more. The caller ends what it has begun.
    machine_->set_fresh(true);
    for (u32 s = 0; s < stages_; ++s) machine_->thread(s).crashes_in = Machine::kNever;
    is_calm_ = true;
    machine_->thread(kObserver).runs = false;
    if (failure_.empty()) machine_->run(1u << kCaller, kBudget);
    if (failure_.empty() && !is_stopping_ && random_.chance(50)) rest();
    // Everything that is dead is known to be. Then no wait needs a deadline.
    for (u32 s = 0; s < target(); ++s)
      if (is_lost_[s]) block_.control(s).alive = 0;
    machine_->refresh();
    has_deadline_ = false;
    const auto any = [](const auto& of, u32 n) {
      return std::any_of(of.begin(), of.begin() + n, [](bool is) { return is; });
    };
    bool waits_in_vain = any(is_lost_, target()) || any(is_ended_, rows_);
    while (failure_.empty() && !is_finished_ && !is_stopping_) {
      machine_->wake(target());
      const Machine::Why why = machine_->run(kAll, kBudget);
      if (why == Machine::Why::kBudget) return fail("no end after %u steps", kBudget);
      if (why != Machine::Why::kRest || is_finished_ || is_stopping_) break;
      // It may have seen a lost stage alive, or an ended row's old limit, in the plan that it was
      // in: neither has a bell, so its deadline ends the wait.
      if (std::exchange(waits_in_vain, false)) {
        wake_the_forgotten();
      } else {
        if (waiting_must_end()) return fail("all wait for each other");
        has_deadline_ = true;
      }
    }
    if (!failure_.empty()) return;
    if (!is_stopping_) {
      for (u32 r = 0; r < rows_; ++r) {
        const u32 length = word(target(), r).length;
        if (!is_ended_[r] && length != text_length_[r])
          return fail("row %u ends at %u, the text at %u", r, length, text_length_[r]);
        coverage.tokens += length - start_[r];
        coverage.eos += length > start_[r] && is_eos(text_[r][length - 1]);
      }
      if (random_.chance(50)) rest();
      if (!failure_.empty()) return;
    }
    pipespec::start(block_, 0);
    machine_->refresh();
    run_to_rest(kAll);
    for (u32 s = 0; s < stages_ && failure_.empty(); ++s)
      if (is_here_[s] && !is_lost_[s] && machine_->thread(s).runs)
        fail("stage %u does not stop", s);
    for (u32 s = 0; s < Machine::kThreads; ++s) machine_->thread(s).runs = false;
  }

  // A stage that crashes between its publication and the last wake-up leaves others asleep, and
  // only time wakes them. All other sleepers need no such help. Returns whether there was one.
  bool wake_the_forgotten() {
    bool forgotten = false;
    for (u32 s = 0; s < target(); ++s) forgotten |= is_lost_[s] && is_ringing_[s];
    for (u32 s = 0; forgotten && s < stages_; ++s) machine_->wake(s);
    return forgotten;
  }
  Machine::Why run_to_rest(u32 threads) {
    const Machine::Why why = machine_->run(threads, kBudget);
    return why == Machine::Why::kRest && wake_the_forgotten() ? machine_->run(threads, kBudget)
                                                              : why;
  }

  // With a lookahead of at least the tokens that it waits for, and no garbage.
  bool waiting_must_end() const {
    for (u32 s = 0; s < target(); ++s) {
      if (is_lost_[s] && is_corrupt_[s]) return false;
      if (block_.control(s).alive != 0 && lookahead_of(s) < std::max(min_draft_tokens_, 1u))
        return false;
    }
    return true;
  }

  // The target ends its step, and the drafts go on until they have nothing left to do.
  void rest() {
    has_deadline_ = is_halting_ = true;
    machine_->wake(target());
    if (random_.chance(50)) machine_->start(kCaller, [] { running->change_lookaheads(); });
    const Machine::Why why = run_to_rest(live_ | 1u << kCaller);
    is_halting_ = false;
    if (why == Machine::Why::kBudget) return fail("the drafts do not come to rest");
    ++coverage.rests;
    for (u32 s = 0; s < target() && failure_.empty(); ++s)
      for (u32 r = 0; r < rows_ && failure_.empty(); ++r)
        if (is_here_[s] && !is_lost_[s] && block_.control(s).lookahead != 0) rested(s, r);
    for (u32 r = 0; r < rows_ && failure_.empty(); ++r) target_at_rest(r);
  }

  // A draft that has nothing left to do: with the target, with its neighbour, and at its bound.
  void rested(u32 s, u32 r) {
    const Word own = word(s, r), truth = word(target(), r);
    if (own.length < truth.length || committed(s, r) != truth.length)
      return fail("at rest stage %u has %u tokens, %u committed; the target has %u", s, own.length,
                  committed(s, r), truth.length);
    for (u32 p = start_[r]; p < truth.length; ++p)
      if (token(s, r, p) != text_[r][p]) return fail("at rest stage %u is wrong at %u", s, p);
    const u32 limit = block_.span(r).limit, lookahead = lookahead_of(s);
    u32 reached = truth.length;
    if (s + 1 != target()) {
      if (is_lost_[s + 1] && is_corrupt_[s + 1]) return;
      const u32 end = std::min(word(s + 1, r).length, limit);  // what lies past it is not wanted
      reached = std::max(reached, end);
      // A neighbour that is gone may never have seen the target's text.
      const bool follows = committed(s + 1, r) == truth.length;
      if (follows && own.length < end) return fail("at rest stage %u has not adopted all", s);
      for (u32 p = truth.length; follows && p < end; ++p)
        if (token(s, r, p) != token(s + 1, r, p))
          return fail("at rest stages %u and %u differ at %u", s, s + 1, p);
    }
    const u64 bound = std::min<u64>(limit, u64{reached} + lookahead);
    const bool ended = own.length > start_[r] && is_eos(token(s, r, own.length - 1));
    if (own.length < bound && !ended)
      fail("at rest stage %u has %u tokens, its bound is %u", s, own.length,
           static_cast<u32>(bound));
  }

  // What the target feeds next, by the rule in words.
  void target_at_rest(u32 r) {
    const u32 s = target();
    if (is_corrupt_[s - 1] && is_lost_[s - 1]) return;
    std::array<std::int32_t, kWidth> fed{};
    const StepPolicy policy{0, max_draft_tokens_, 0, width_};
    const Step step = foresee(block_, s, r, policy, fed.data());
    if (copies_ && !is_ended_[r] && !is_lost_[s - 1]) {
      const Step shadow = foresee(copy_, s, r, policy, fed.data());
      if (shadow.action != step.action || shadow.kv != step.kv ||
          shadow.query_len != step.query_len || shadow.num_draft_tokens != step.num_draft_tokens)
        return fail("at rest the host shadow of row %u foresees another step", r);
    }
    const u32 length = word(s, r).length, limit = block_.span(r).limit;
    const u32 reach = word(s - 1, r).length;
    if (length >= limit || (length > start_[r] && is_eos(token(s, r, length - 1)))) {
      if (step.action != Action::kFinished) fail("the target has ended and does not know it");
      return;
    }
    bool agrees = reach >= length;
    for (u32 p = start_[r]; p < length && agrees; ++p)
      agrees = token(s, r, p) == token(s - 1, r, p);
    const u32 room = std::min({max_draft_tokens_, width_ - 1, limit - length - 1});
    const u32 drafts = agrees ? std::min(reach - length, room) : 0;
    if (step.action != Action::kStep || step.kv != length - 1 || step.query_len != 1 + drafts ||
        step.num_draft_tokens != drafts)
      return fail(
          "at rest the target at %u feeds %u tokens from %u, %u of them draft tokens; not %u",
          length, step.query_len, step.kv, step.num_draft_tokens, drafts);
    for (u32 i = 0; i < drafts; ++i)
      if (fed[1 + i] != token(s - 1, r, length + i)) fail("another token than upstream's at %u", i);
  }

  // --- fibers ------------------------------------------------------------------------------------

  // As the loop of a worker, and of the target with its deadline.
  void stage(u32 s) {
    constexpr auto kForever = static_cast<std::int64_t>(Machine::kForever);
    StagePort& port = *ports_[s];
    u32 waited = 0;
    for (;;) {
      if (port.generation() != number_) machine_->end();
      if (is_halting_ && s == target()) {
        machine_->idle();
        continue;
      }
      StepPolicy policy{0, max_draft_tokens_, 0, width_};
      if (s == target()) {
        if (!has_deadline_ || waited < 3) policy.min_draft_tokens = min_draft_tokens_;
      } else {
        policy.lookahead = port.lookahead();
        policy.max_draft_tokens = std::min(policy.max_draft_tokens, port.upstream_lookahead());
        if (policy.lookahead == 0) {
          port.pause(kForever);
          continue;
        }
      }
      if (is_changing_) {
        policy.max_draft_tokens = random_.below(policy.max_draft_tokens + 1);
        policy.min_draft_tokens = random_.below(policy.min_draft_tokens + 1);
      }
      const Action action = step(s, policy);
      if (action == Action::kStep) continue;
      if (action == Action::kFinished) {
        is_finished_ = true;
        machine_->end();
      }
      const bool waits = action == Action::kWait;
      waited = waits ? waited + 1 : 0;
      coverage.waits += waits;
      port.park(waits && has_deadline_ ? 1 + random_.below(300) : kForever);
      ++coverage.parks;
    }
  }

  Action step(u32 s, const StepPolicy& policy) {
    StagePort& port = *ports_[s];
    if (copies_ && random_.chance(10)) {
      const u32 r = random_.below(rows_);
      const Word before = word(s, r);
      std::array<std::int32_t, kWidth> unused;
      const Step foreseen =
          foresee(random_.chance(50) ? copy_ : block_, s, r, policy, unused.data());
      check(foreseen.query_len <= policy.width, "stage %u foresees %u tokens", s,
            foreseen.query_len);
      check(pack(before) == pack(word(s, r)), "foresee() of stage %u writes", s);
    }
    machine_->thread(s).look();
    const Action action =
        port.plan(policy.lookahead, policy.max_draft_tokens, policy.min_draft_tokens);
    is_ringing_[s] = false;
    for (u32 r = 0; r < rows_; ++r) {
      const auto number = [r](const std::vector<std::int32_t>& of) {
        return static_cast<u32>(of[r]);
      };
      const u32 fed = number(port.query_lens());
      planned_[s][r] = {number(port.n_select()) > 0 ? Action::kStep
                        : fed > 0                   ? Action::kCatchUp
                                                    : Action::kIdle,
                        number(port.kv()), fed, number(port.num_draft_tokens())};
      check(planned_[s][r].action != Action::kStep || number(port.n_select()) == fed,
            "stage %u selects %u of %u tokens", s, number(port.n_select()), fed);
      check_plan(s, r, policy, action);
    }
    if (action == Action::kStep) {
      if (pause_[s] > 0) machine_->sleep(random_.below(pause_[s]));
      // A forward may fail, and the driver may let its stage go on.
      const bool fails = s != target() && random_.chance(fails_percent_);
      forward(s, port.columns());
      if (!fails) commit(s);
    }
    if (copies_) replicate(block_, copy_, s, 0, rows_);
    return action;
  }

  void check_plan(u32 s, u32 r, const StepPolicy& policy, Action action) {
    const Step& step = planned_[s][r];
    const u32 length = word(s, r).length, known = step.query_len - step.num_draft_tokens;
    const Machine::Thread& t = machine_->thread(s);
    const u32 limit = t.seen_limit[r];
    u32 reached = static_cast<u32>(t.seen_word[target()][r]);
    if (s + 1 < target()) reached = std::max(reached, static_cast<u32>(t.seen_word[s + 1][r]));
    const u32 bound = s == target()
                          ? limit
                          : static_cast<u32>(std::min<u64>(limit, u64{reached} + policy.lookahead));
    bounds_[s][r] = bound;
    const bool ended = length >= limit || (length > start_[r] && is_eos(token(s, r, length - 1)));
    const bool feeds = step.query_len > 0;
    check(step.query_len <= policy.width && step.num_draft_tokens <= policy.max_draft_tokens,
          "stage %u feeds %u tokens, %u draft tokens", s, step.query_len, step.num_draft_tokens);
    check(s > 0 || step.num_draft_tokens == 0, "stage 0 takes draft tokens");
    check(!ended || !feeds, "stage %u feeds past its end at %u", s, length);
    check(action != Action::kFinished || (ended && s == target()), "stage %u is not finished", s);
    check(feeds || ended || (s != target() && length >= bound) || action == Action::kWait,
          "stage %u idles at %u, its bound is %u", s, length, bound);
    check(action != Action::kWait || policy.min_draft_tokens > 0, "stage %u waits", s);
    check(!feeds || length < bound, "stage %u feeds at %u, its bound is %u", s, length, bound);
    check(!feeds || step.kv + known <= length, "stage %u feeds %u tokens from %u", s, known,
          step.kv);
    check((step.action == Action::kStep) == (feeds && step.kv + known == length),
          "stage %u selects after %u of %u tokens", s, step.kv + known, length);
    for (u32 i = 0; feeds && i < known; ++i)
      check(fed(s, r)[i] == token(s, r, step.kv + i),
            "stage %u feeds another token than its own at %u", s, step.kv + i);
    check_row(s, r);
  }

  void forward(u32 s, u32 columns) {
    for (u32 r = 0; r < rows_; ++r) {
      const Step& step = planned_[s][r];
      const std::int32_t* tokens = fed(s, r);
      auto& entries = caches_[s][r].entries;
      std::int32_t* selected = &selected_[s][r * kWidth];
      std::fill_n(selected, kWidth, -1);
      if (step.query_len == 0) continue;
      if (!check(step.kv + columns <= kPositions, "stage %u feeds at %u", s, step.kv)) return;
      for (u32 i = 0; i < columns; ++i)
        entries[step.kv + i] = i < step.query_len ? tokens[i] : kGarbage;
      if (step.action != Action::kStep) continue;
      const u32 drafts = step.num_draft_tokens, known = step.query_len - drafts;
      u64 hash = Truth::hash_of(entries.data(), step.kv + known);
      for (u32 j = 0;; ++j) {
        selected[j] = models_[s].next(hash);
        if (j == drafts || selected[j] != tokens[known + j]) break;
        hash = fake::extend(hash, selected[j]);
      }
    }
  }

  void commit(u32 s) {
    u32 before[kRows], expected_in_all = 0;
    for (u32 r = 0; r < rows_; ++r) before[r] = word(s, r).length;
    machine_->thread(s).look();
    const u32 appended = ports_[s]->commit(selected_[s].data(), kWidth);
    is_ringing_[s] = false;
    for (u32 r = 0; r < rows_; ++r) {
      const Step& step = planned_[s][r];
      const std::int32_t* selected = &selected_[s][r * kWidth];
      const u32 drafts = step.num_draft_tokens, known = step.query_len - drafts;
      // The longest prefix that its own choices confirm, and one token more.
      u32 expected = 0;
      const u32 limit = machine_->thread(s).seen_limit[r];
      while (step.action == Action::kStep && before[r] + expected < limit) {
        const u32 j = expected++;
        if (j == drafts || selected[j] != fed(s, r)[known + j] || is_eos(selected[j])) break;
      }
      const u32 length = word(s, r).length;
      check(length == before[r] + expected, "stage %u appends %u tokens, not %u", s,
            length - before[r], expected);
      check(expected == 0 || length <= bounds_[s][r], "stage %u is at %u, its bound is %u", s,
            length, bounds_[s][r]);
      for (u32 j = 0; j < expected; ++j)
        check(token(s, r, before[r] + j) == selected[j], "stage %u appends what it has not chosen",
              s);
      expected_in_all += expected;
      check_row(s, r);
    }
    check(appended == expected_in_all, "stage %u says that it appends %u tokens", s, appended);
  }

  // What holds for a row between two halves of a step.
  void check_row(u32 s, u32 r) {
    const Word own = word(s, r);
    const Private& priv = block_.priv(s, r);
    const Counters& c = priv.counters;
    check(priv.kv < own.length && priv.kv + 1 >= start_[r], "stage %u has fed %u of %u tokens", s,
          priv.kv, own.length);
    check(start_[r] + c.produced + c.adopted - c.truncated == own.length &&
              c.rollbacks == own.epoch && c.accepted <= c.drafted && c.drafted <= c.fed,
          "the counters of stage %u do not add up to %u tokens", s, own.length);
    check(committed(s, r) <= own.length, "stage %u has committed %u of %u", s, committed(s, r),
          own.length);
    const auto& entries = caches_[s][r].entries;
    for (u32 p = 0; p < std::min(priv.kv, kPositions); ++p)
      check(entries[p] == (p < start_[r] ? text_[r][p] : token(s, r, p)),
            "the cache of stage %u is wrong at %u", s, p);
  }

  // What the caller does at any moment, from a thread of its own.
  void caller() {
    for (u32 events = random_.below(random_.pick({4u, 4u, 12u})); events > 0; --events) {
      machine_->sleep(random_.below(random_.pick({30u, 100u, 1000u, 5000u})));
      if (is_calm_) break;
      const u32 s = random_.below(target());
      switch (random_.below(16)) {
        case 0:
          is_stopping_ = true;
          pipespec::start(block_, 0);
          ++coverage.stops;
          machine_->end();
        case 1:
        case 2: {
          const u32 r = random_.below(rows_);
          is_ended_[r] = true;
          ++coverage.ended_rows;
          end_row(block_, r);
          break;
        }
        case 3:
        case 4:
          if (is_lost_[s]) store_release(&block_.control(s).alive, 0u);
          break;
        default:
          set_lookahead(block_, s, random_.pick({0u, 1u, 1u, 2u, 4u, 8u, ~0u}));
      }
    }
    machine_->end();
  }

  // The last of them may come while a draft goes to sleep.
  void change_lookaheads() {
    for (u32 changes = 3; changes > 0; --changes) {
      machine_->sleep(random_.below(random_.pick({10u, 50u, 200u})));
      set_lookahead(block_, random_.below(target()), random_.pick({1u, 2u, 4u, 8u, ~0u}));
    }
    machine_->end();
  }

  // Reads as a neighbour does, knowing all texts of all epochs.
  void observer() {
    for (u32 looks = 40; looks > 0; --looks) {
      machine_->sleep(random_.below(200));
      const u32 s = random_.below(stages_), r = random_.below(rows_);
      const bool of_copy = copies_ && random_.chance(50);
      const Sequence sequence(of_copy ? copy_ : block_, s, r);
      const Word seen = sequence.word();
      const u32 settled = std::min(sequence.committed(), seen.length);
      if (is_corrupt_[s]) continue;
      const Ghost& ghost = ghosts_[s][r];
      check(seen.epoch < ghost.epochs.size() && seen.length >= start_[r] &&
                seen.length <= start_[r] + mask_,
            "stage %u has epoch %u with %u tokens", s, seen.epoch, seen.length);
      std::array<std::int32_t, kCapacity> tokens{};
      for (u32 p = start_[r]; p < seen.length; ++p) tokens[p & mask_] = sequence.token(p);
      if (!sequence.still(seen)) {
        ++coverage.torn;
        continue;
      }
      if (is_corrupt_[s]) continue;
      ++coverage.observed;
      for (u32 p = start_[r]; p < seen.length; ++p)
        check(tokens[p & mask_] == ghost.epochs[seen.epoch][p & mask_],
              "%s of stage %u shows another token than that of epoch %u at %u",
              of_copy ? "the copy" : "the ring", s, seen.epoch, p);
      for (u32 p = start_[r]; p < settled; ++p)
        check(tokens[p & mask_] == text_[r][p],
              "stage %u shows a committed token that is wrong at %u", s, p);
    }
    machine_->end();
  }

  // A draft whose memory is damaged: anything, anywhere in what is its own.
  void corrupt(u32 s) {
    for (u32 stores = random_.below(60); stores > 0; --stores) {
      const u32 r = random_.below(rows_);
      const u64 any = random_.next();
      switch (random_.below(4)) {
        case 0:
          store_release(&block_.published(s, r).word,
                        random_.chance(50) ? any : pack({random_.below(4), random_.below(40)}));
          break;
        case 1:
          store_relaxed(&block_.published(s, r).committed,
                        random_.chance(50) ? static_cast<u32>(any) : random_.below(30));
          break;
        default:
          store_relaxed(&block_.ring(s, r)[any & mask_],
                        random_.chance(30)   ? truth_.eos[0]
                        : random_.chance(50) ? static_cast<std::int32_t>(any >> 32)
                                             : 100 + static_cast<std::int32_t>(random_.below(5)));
      }
      if (random_.chance(20)) machine_->sleep(random_.below(100));
    }
    machine_->end();
  }

  // --- told by the machine -----------------------------------------------------------------------

  void crashed(u32 s) override {
    is_lost_[s] = true;
    ++coverage.crashes;
    if (!becomes_corrupt_[s]) return;
    is_corrupt_[s] = true;
    ++coverage.corrupt;
    machine_->start(s, [] { running->corrupt(running->machine_->current()); }, 1);
  }

  void stored(u32 thread, const Place& place, u64 bits) override {
    const u32 s = place.stage, r = place.row;
    const bool rings = (place.kind == Kind::kWord && !place.copy) || place.kind == Kind::kBell;
    if (rings && thread < target()) is_ringing_[thread] = true;
    if (place.kind == Kind::kNone || place.kind >= Kind::kLimit) return;
    check(thread == s, "thread %u writes what is stage %u's", thread, s);
    if (place.copy || is_corrupt_[s]) return;
    Ghost& ghost = ghosts_[s][r];
    auto& ring = ghost.epochs.back();
    switch (place.kind) {
      case Kind::kToken: {
        const u32 p = ghost.word.length + ((place.index - ghost.word.length) & mask_);
        const auto token = static_cast<std::int32_t>(bits);
        if (!check(p < start_[r] + mask_, "stage %u overwrites position %u", s, p - mask_ - 1))
          return;
        if (s == target())
          check(p < text_length_[r] && token == text_[r][p], "the target says %d at %u, not %d",
                token, p, text_[r][p]);
        check(p < limit_[r], "stage %u appends at %u, past the limit", s, p);
        ring[place.index] = token;
        ghost.written |= 1u << place.index;
        break;
      }
      case Kind::kWord: {
        const Word before = ghost.word, now = unpack(bits);
        ghost.word = now;
        if (!check(now.length >= start_[r] && now.length <= limit_[r],
                   "stage %u publishes %u tokens", s, now.length))
          return;
        if (now.epoch == before.epoch) {
          check(now.length >= before.length, "stage %u has %u tokens instead of %u in one epoch", s,
                now.length, before.length);
          for (u32 p = before.length; p < now.length; ++p)
            check((ghost.written >> (p & mask_) & 1) != 0,
                  "stage %u publishes position %u, which it has not written", s, p);
        } else {
          check(now.epoch == before.epoch + 1 && now.length < before.length,
                "stage %u rolls back from %u to %u", s, before.length, now.length);
          check(s != target() && now.length >= ghost.committed,
                "stage %u rolls back what is committed, to %u", s, now.length);
          ++coverage.rollbacks;
          ghost.epochs.push_back(ring);
        }
        ghost.written = 0;
        break;
      }
      case Kind::kCommitted: {
        const auto now = static_cast<u32>(bits);
        if (!check(now >= ghost.committed && now <= ghost.word.length &&
                       now <= ghosts_[target()][r].word.length,
                   "stage %u has %u committed tokens", s, now))
          return;
        for (u32 p = ghost.committed; p < now; ++p)
          check(ring[p & mask_] == text_[r][p], "stage %u commits a wrong token at %u", s, p);
        ghost.committed = now;
        break;
      }
      default:
        break;
    }
  }

  // --- small things ------------------------------------------------------------------------------

  u32 target() const { return stages_ - 1; }
  u32 lookahead_of(u32 s) const { return block_.control(s).lookahead; }
  // What the owner has stored last, without a step of the machine.
  Word word(u32 s, u32 r) const { return unpack(block_.published(s, r).word); }
  u32 committed(u32 s, u32 r) const { return block_.published(s, r).committed; }
  std::int32_t token(u32 s, u32 r, u32 p) const { return block_.ring(s, r)[p & mask_]; }
  const std::int32_t* fed(u32 s, u32 r) { return &ports_[s]->tokens()[std::size_t{r} * width_]; }
  bool is_eos(std::int32_t token) const {
    return std::find(truth_.eos.begin(), truth_.eos.end(), token) != truth_.eos.end();
  }

  template <class... Values>
  bool check(bool held, const char* what, Values... values) {
    if (!held) fail(what, values...);
    return held;
  }
  // From a fiber it does not return.
  template <class... Values>
  void fail(const char* what, Values... values) {
    if (failure_.empty()) {
      char text[200];
      if constexpr (sizeof...(values) == 0) {
        std::snprintf(text, sizeof text, "%s", what);
      } else {
        std::snprintf(text, sizeof text, what, values...);
      }
      failure_ = text;
    }
    machine_->stop();
  }

  static constexpr u32 kBudget = 400'000;
  static inline Simulation* running = nullptr;

  std::size_t arena_bytes_ = 0;
  void* arena_ = nullptr;
  std::optional<Machine> machine_;
  Random random_;
  Block block_, copy_;
  std::string failure_;

  u32 stages_ = 0, rows_ = 0, mask_ = 0, number_ = 0, live_ = 0;
  u32 min_draft_tokens_ = 0, max_draft_tokens_ = 0, width_ = 0, fails_percent_ = 0;
  bool copies_ = false, has_deadline_ = true, is_stopping_ = false, is_finished_ = false;
  bool is_changing_ = false;  // the policy, with each step
  bool is_calm_ = false;      // the caller does nothing new
  bool is_halting_ = false;   // the target takes no further step
  Truth truth_;
  std::array<Model, kStages> models_;
  std::array<u32, kRows> start_{}, limit_{}, text_length_{};
  std::array<std::array<std::int32_t, kPositions>, kRows> text_{};
  std::array<bool, kRows> is_ended_{};
  std::array<bool, kStages> is_here_{}, is_lost_{}, is_corrupt_{}, becomes_corrupt_{};
  std::array<bool, kStages> is_ringing_{};  // has published, and not yet woken all others
  std::array<u32, kStages> pause_{};
  std::array<std::array<Ghost, kRows>, kStages> ghosts_;
  std::array<std::array<Cache, kRows>, kStages> caches_;
  std::array<std::array<Step, kRows>, kStages> planned_{};
  std::array<std::array<u32, kRows>, kStages> bounds_{};
  std::array<std::array<std::int32_t, kRows * kWidth>, kStages> selected_{};
  std::array<std::optional<StagePort>, kStages> ports_;
};

Simulation& simulation() {
  static Simulation it;
  return it;
}

}  // namespace

static Machine& machine() { return simulation().machine(); }

namespace {

unsigned long long number(u64 n) { return n; }

void print_coverage(const char* when) {
  const Coverage& c = simulation().coverage;
  std::printf("  %s: %llu schedules, %llu accesses, %llu of them old values\n", when,
              number(c.schedules), number(c.accesses), number(c.stale));
  std::printf("    stages");
  for (u32 s = 2; s <= kStages; ++s) std::printf(" %u: %llu", s, number(c.stages[s]));
  std::printf("; batches %llu, with a host shadow %llu\n", number(c.batches), number(c.copies));
  std::printf("    generations %llu, stops %llu, rows ended %llu, texts with EOS %llu\n",
              number(c.generations), number(c.stops), number(c.ended_rows), number(c.eos));
  std::printf("    crashes %llu, %llu of them with garbage, restarts %llu\n", number(c.crashes),
              number(c.corrupt), number(c.restarts));
  std::printf(
      "    tokens %llu, rollbacks %llu, sleeps %llu, waits %llu, rests %llu, looks %llu and %llu "
      "torn\n",
      number(c.tokens), number(c.rollbacks), number(c.parks), number(c.waits), number(c.rests),
      number(c.observed), number(c.torn));
  std::fflush(stdout);
}

// The number of schedules until one fails; 0: none does. Sets `seed` to that one.
u64 run_until_failure(u64 max_runs, Fault fault, u64& seed) {
  for (seed = 0; seed < max_runs; ++seed)
    if (!simulation().run(seed, fault)) return seed + 1;
  return 0;
}

// Replays a schedule. Returns whether everything held.
bool replay(u64 seed, Fault fault) {
  const bool held = simulation().run(seed, fault, true);
  simulation().print_trace();
  std::fprintf(stderr, "seed %llu: %s\n", number(seed),
               held ? "everything held" : simulation().failure().c_str());
  return held;
}

}  // namespace

#if !defined(PIPESPEC_PLANTED)

TEST(every_schedule_gives_the_text_of_the_target) {
  constexpr u64 kReport = 1'000'000;
#if defined(PIPESPEC_OWN_FIBERS)
  const u64 max_runs = trials(40'000, 10'000'000);
#else  // ucontext, perhaps under a sanitizer
  const u64 max_runs = trials(8'000, 1'000'000);
#endif
  for (u64 seed = 0; seed < max_runs; ++seed) {
    if (!CHECK(simulation().run(seed))) {
      std::fprintf(stderr, "seed %llu: %s\n  replay it with: test_simulation --seed %llu\n",
                   number(seed), simulation().failure().c_str(), number(seed));
      return;
    }
    if ((seed + 1) % kReport == 0) print_coverage("so far");
  }
  print_coverage("all");
}

// Equal seeds give equal schedules, whatever ran before.
TEST(a_seed_is_a_schedule) {
  const auto accesses_of = [](u64 seed) {
    const u64 before = simulation().coverage.accesses;
    CHECK(simulation().run(seed));
    return simulation().coverage.accesses - before;
  };
  std::vector<u64> first;
  for (u64 seed = 0; seed < 20; ++seed) first.push_back(accesses_of(seed));
  for (u64 seed = 20; seed-- > 0;) CHECK_EQ(accesses_of(seed), first[seed]);
}

// Can these checks fail? Each fault of the memory shows within a few thousand schedules.
TEST(each_fault_of_the_memory_shows) {
  for (u32 f = 1; f < static_cast<u32>(Fault::kCount); ++f) {
    u64 seed = 0;
    const u64 schedules = run_until_failure(trials(20'000, 100'000), static_cast<Fault>(f), seed);
    if (!CHECK(schedules > 0)) {
      std::fprintf(stderr, "  %s does not show\n", simulated::kFaults[f]);
      continue;
    }
    std::printf("  %-20s shows after %4llu schedules, at seed %llu: %s\n", simulated::kFaults[f],
                number(schedules), number(seed), simulation().failure().c_str());
  }
}

#else  // a header of the protocol has a fault (CMakeLists.txt)

TEST(the_planted_fault_shows) {
  u64 seed = 0;
  const u64 schedules = run_until_failure(trials(50'000, 500'000), Fault::kNone, seed);
  if (CHECK(schedules > 0))
    std::printf("  shows after %llu schedules, at seed %llu: %s\n", number(schedules), number(seed),
                simulation().failure().c_str());
}

#endif

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 2 || arguments[0] != "--seed") return check::run(argc, argv);
  auto fault = Fault::kNone;
  if (arguments.size() > 2) {
    const auto* name =
        std::find(std::begin(simulated::kFaults), std::end(simulated::kFaults), arguments[2]);
    if (name == std::end(simulated::kFaults)) {
      std::fprintf(stderr, "no fault has the name %s\n", arguments[2].c_str());
      return 2;
    }
    fault = static_cast<Fault>(name - std::begin(simulated::kFaults));
  }
  return replay(std::stoull(arguments[1]), fault) ? 0 : 1;
}
