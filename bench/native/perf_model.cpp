// Discrete-event simulation of a chain in virtual time, to predict what a schedule gives before it
// is run. bench/perf_model.py compiles this file, calls simulate(), and checks no setting.
//
// The asynchronous schedule calls the product's own StagePort, plan() and commit(). The protocol is
// executed and not modelled, so the simulation cannot differ from it. Only the forwards are
// modelled: their duration, and the tokens that the stages choose. The two published schedules
// (arXiv 2505.01572) are there for comparison. Each stage has a device of its own, and there is one
// row. Every function gives the same result for the same seed on every machine with IEEE doubles.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/generation.hpp"
#include "runtime/stage_port.hpp"

namespace pipespec::perf {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// The token that each stage chooses. Exactly one of `acceptance` and `table` is given.
//
// `acceptance[s]`: probability that stages s and s+1 choose the same token after the same text,
// independent between positions, contexts and pairs. Two texts that have parted never become equal
// again by chance.
//
// `table`: [positions][stages - 1] bytes, one row per position of the target's text: 0 where the
// draft chooses the target's token; equal numbers are equal tokens. The table replays a text, with
// its correlations between stages and along the text. After a text that is not the target's, the
// row of a pseudo-random position applies. Positions past the end begin again.
struct StageModel {
  const double* step_s;  // seconds of a step that feeds [i] + 1 columns; the last for wider ones
  u32 widths;            // entries of step_s
  // As in StepPolicy; the minimum has a deadline.
  u32 lookahead, max_draft_tokens, min_draft_tokens;
  double start_s;  // when its prompt is ready
};

// bench/perf_model.py has the same fields in the same order, as of StageModel.
struct Setting {
  const StageModel* models;
  const double* acceptance;
  const std::uint8_t* table;  // null: acceptance counts
  u64 positions;              // of the table
  u64 seed;
  u32 n_stages;
  u32 tokens;     // new tokens
  u32 width;      // columns of a step
  u32 lookahead;  // the published schedules only
  // The asynchronous schedule only. decode_meanwhile: with fewer draft tokens than
  // `min_draft_tokens`, decode one token and leave the draft tokens alone, instead of sleeping. For
  // targets whose one-token steps cost much less than wider ones. preempt is an idealisation, to
  // check closed forms; no driver has it: a draft drops its running forward when a correction
  // makes it useless.
  u32 decode_meanwhile, preempt;
  double patience;  // deadline of a wait: this * min_draft_tokens * mean step of upstream
  // Asynchronous: pause of a verifier and its upstream after each step of the verifier, an
  // idealisation, too. The published schedules: the fixed cost of one acknowledgement.
  double handshake_s;

  std::span<const StageModel> stages() const { return {models, n_stages}; }
};

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr u32 kReferenceCap = 100;  // the reference feeds at most this many tokens per verification

// What the caller gets of a stage: bench/perf_model.py has the same numbers in the same order.
struct StageResult {
  u64 steps = 0;     // forwards
  u64 drafted = 0;   // draft tokens fed
  u64 accepted = 0;  // draft tokens that survived
  u64 rollbacks = 0;
  u64 histogram[kReferenceCap + 1] = {};  // [n]: steps that appended n tokens
};
using Results = std::span<StageResult>;

u64 mix(u64 x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Texts as trees: a token's id stands for the path through the tree that led to it. kTrue is the
// target's token after the target's own text; any other id is a hash of the position, the token
// before and the class of the answer, so equal ids mean equal texts up to there.
constexpr std::int32_t kTrue = 0;

class Oracle {
 public:
  explicit Oracle(const Setting& setting)
      : table_(setting.table),
        target_(setting.n_stages - 1),
        positions_(setting.positions),
        seed_(mix(setting.seed + 1)) {
    for (const double a : std::span(setting.acceptance, table_ ? 0 : target_)) {
      // 2^64 does not fit, so certainty is one step below it. The flag keeps exact certainty.
      threshold_.push_back(a >= 1.0 ? ~u64{0} : static_cast<u64>(std::ldexp(a, 64)));
      certain_.push_back(a >= 1.0);
    }
  }

  // The choice of `stage` at the `index`-th generated position, after the token `prev`.
  std::int32_t next(u32 stage, u32 index, std::int32_t prev) const {
    if (prev == kTrue && stage == target_) return kTrue;
    const bool on_path = prev == kTrue;
    u64 node = mix(seed_ ^ index);
    if (!on_path) node = mix(node ^ static_cast<u64>(static_cast<u32>(prev)) * kOdd);
    const u32 answer = answer_of(stage, index, on_path, node);
    if (on_path && answer == 0) return kTrue;
    return static_cast<std::int32_t>(mix(node + answer * kOdd) >> 33) + 1;  // 1 .. 2^31
  }

 private:
  static constexpr u64 kOdd = 0x9e3779b97f4a7c15u;

  u32 answer_of(u32 stage, u32 index, bool on_path, u64 node) const {
    if (stage == target_) return 0;
    if (table_) return table_[(on_path ? index : mix(node)) % positions_ * target_ + stage];
    // A stage's class is named after the last stage, going downstream, that still agrees with it.
    u32 s = stage;
    while (s < target_ && (certain_[s] || mix(node + (s + 1) * kOdd) < threshold_[s])) ++s;
    return target_ - s;
  }

  const std::uint8_t* table_;
  std::vector<u64> threshold_;
  std::vector<bool> certain_;
  u32 target_;
  u64 positions_;
  u64 seed_;
};

double step_time(const StageModel& stage, u32 columns) {
  return stage.step_s[std::min(columns, stage.widths) - 1];
}

// The product's block and ports, with stages that choose the oracle's tokens.
class Chain {
 public:
  explicit Chain(const Setting& setting)
      : setting_(setting),
        target_(setting.n_stages - 1),
        oracle_(setting),
        selected_(setting.width) {
    const u32 capacity = std::bit_ceil(setting.tokens + 2);
    const std::size_t bytes = Block::bytes(target_ + 1, 1, capacity);
    memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine})));
    std::memset(memory_.get(), 0, bytes);
    block_ = Block::create(memory_.get(), target_ + 1, 1, capacity);
    // The prompt is one token, the true one.
    reset(block_, {kStart}, {kStart + setting.tokens}, {kTrue}, {});
    ports_.reserve(target_ + 1);
    for (u32 s = 0; s <= target_; ++s) {
      block_.control(s).alive = 1;
      ports_.emplace_back(block_, s, setting.width);
    }
  }

  const Block& block() const { return block_; }
  u32 target() const { return target_; }

  Action plan(u32 stage, u32 min_draft_tokens) {
    const StageModel& model = setting_.models[stage];
    return ports_[stage].plan(model.lookahead, model.max_draft_tokens, min_draft_tokens);
  }
  Action plan_plain(u32 stage) {
    return ports_[stage].plan(setting_.models[stage].lookahead, 0, 0);
  }
  double planned_time(u32 stage) const {
    return step_time(setting_.models[stage], ports_[stage].columns());
  }

  void commit(u32 stage) {
    StagePort& port = ports_[stage];
    if (port.n_select()[0] > 0) {
      const auto num_draft_tokens = static_cast<u32>(port.num_draft_tokens()[0]);
      const u32 own = static_cast<u32>(port.query_lens()[0]) - num_draft_tokens;
      const std::int32_t* fed = port.tokens().data();
      const u32 index = static_cast<u32>(port.kv()[0]) + own - kStart;
      for (u32 j = 0;; ++j) {
        selected_[j] = oracle_.next(stage, index + j, fed[own + j - 1]);
        if (j == num_draft_tokens || selected_[j] != fed[own + j]) break;
      }
    }
    port.commit(selected_.data(), port.width());
  }

  // Whether the published tokens of others make the stage's running step useless.
  bool contradicted(u32 stage) const {
    const Sequence own(block_, stage, 0);
    for (const u32 other : {stage + 1, target_}) {
      const Sequence truth(block_, other, 0);
      const u32 common = std::min(own.word().length, truth.word().length);
      if (detail::first_difference(own, truth, std::min(own.committed(), common), common) < common)
        return true;
    }
    return false;
  }

  void write(Results results) const {
    for (u32 s = 0; s <= target_; ++s) {
      const Counters& c = block_.priv(s, 0).counters;
      results[s] = {c.steps, c.drafted, c.accepted, c.rollbacks, {}};
      std::copy_n(c.histogram, kHistogram, results[s].histogram + 1);
    }
  }

 private:
  static constexpr u32 kStart = 1;
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{kLine}); }
  };

  const Setting& setting_;
  u32 target_;
  Oracle oracle_;
  std::vector<std::int32_t> selected_;
  std::unique_ptr<char, Free> memory_;
  Block block_;
  std::vector<StagePort> ports_;
};

// The asynchronous schedules: each stage polls, computes or sleeps by itself.
class Workers {
 public:
  explicit Workers(const Setting& setting) : setting_(setting), chain_(setting) {
    // As after earlier generations: the mean is known from the start.
    for (const StageModel& model : setting.stages())
      runners_.push_back({State::kReady, model.start_s, 0.0, model.step_s[0], false, kNever});
  }

  // Returns the seconds until the target's text is complete.
  double run(Results results) {
    while (true) {
      now_ = kNever;
      for (const Runner& r : runners_) now_ = std::min(now_, r.at);
      if (now_ == kNever)
        throw std::runtime_error(
            "the simulated chain stands still: a stage waits, without a deadline, for draft tokens "
            "that cannot come");
      // Steps that end now are published before any stage plans.
      for (u32 s = 0; s < runners_.size(); ++s)
        if (runners_[s].state == State::kRunning && runners_[s].at <= now_) finish(s);
      for (u32 s = 0; s < runners_.size(); ++s)
        if (runners_[s].state != State::kRunning && runners_[s].at <= now_ && look(s)) {
          chain_.write(results);
          return now_;
        }
    }
  }

 private:
  enum class State { kReady, kRunning, kParked };
  struct Runner {
    State state;
    double at;  // running: when the step ends; ready: when it looks; parked: its deadline
    double began;
    double mean_step;  // running
    bool waiting;
    double deadline;

    void look_at(double time) {
      state = State::kReady;
      at = time;
    }
  };

  void finish(u32 s) {
    Runner& r = runners_[s];
    r.look_at(now_);
    r.mean_step = 0.9 * r.mean_step + 0.1 * (now_ - r.began);
    chain_.commit(s);
    wake_others(s);
    if (setting_.preempt)
      for (u32 u = 0; u < s; ++u)
        if (runners_[u].state == State::kRunning && chain_.contradicted(u))
          runners_[u].look_at(now_);
    if (setting_.handshake_s > 0.0 && s > 0) {
      r.at = now_ + setting_.handshake_s;
      Runner& upstream = runners_[s - 1];
      if (upstream.state == State::kRunning)
        upstream.at += setting_.handshake_s;
      else
        upstream.look_at(now_ + setting_.handshake_s);
    }
  }

  void wake_others(u32 s) {
    for (u32 t = 0; t < runners_.size(); ++t)
      if (t != s && runners_[t].state == State::kParked) runners_[t].look_at(now_);
  }

  Action plan(u32 s, u32 min_draft_tokens) {
    const Action action = chain_.plan(s, min_draft_tokens);
    if (action == Action::kWait && setting_.decode_meanwhile) return chain_.plan_plain(s);
    return action;
  }

  // Returns whether all is done.
  bool look(u32 s) {
    Runner& r = runners_[s];
    const u32 bell = chain_.block().status(s).bell;
    u32 min_draft_tokens = setting_.models[s].min_draft_tokens;
    if (r.waiting && now_ >= r.deadline) min_draft_tokens = 0;
    Action action = plan(s, min_draft_tokens);
    if (action == Action::kWait) {
      if (!r.waiting) {
        r.waiting = true;
        r.deadline = now_ + setting_.patience * (min_draft_tokens * runners_[s - 1].mean_step);
      }
      if (r.deadline <= now_) action = plan(s, 0);
    }
    if (chain_.block().status(s).bell != bell) wake_others(s);
    if (action == Action::kStep) {
      r = {State::kRunning, now_ + chain_.planned_time(s), now_, r.mean_step, false, r.deadline};
    } else {
      if (action == Action::kFinished && s == chain_.target()) return true;
      r.state = State::kParked;
      r.at = action == Action::kWait ? r.deadline : kNever;
      if (action != Action::kWait) r.waiting = false;
    }
    return false;
  }

  const Setting& setting_;
  Chain chain_;
  std::vector<Runner> runners_;
  double now_ = 0.0;
};

// The published system, from its description: sequences that are copied, counters of requests and
// acknowledgements, a minimum lookahead.
class Reference {
 public:
  explicit Reference(const Setting& setting)
      : setting_(setting), target_(setting.n_stages - 1), oracle_(setting) {
    for (u32 s = 0; s <= target_; ++s) {
      Stage stage;
      // The prompt's last token, and the first token, which each stage takes from its own prefill.
      stage.out = {kTrue, oracle_.next(s, 0, kTrue)};
      stage.at = setting.models[s].start_s;
      stages_.push_back(std::move(stage));
    }
  }

  double asynchronous(Results results) {
    for (now_ = 0.0; !complete();) {
      // Blocked stages poll, because a step of one may free another.
      for (bool changed = true; changed;) {
        changed = false;
        for (u32 s = 0; s <= target_; ++s)
          if (!stages_[s].running && stages_[s].at <= now_) changed |= look(s);
      }
      double next = kNever;
      for (const Stage& s : stages_)
        if (s.running || s.at > now_) next = std::min(next, s.at);
      if (next == kNever) throw std::logic_error("the simulated reference stands still");
      now_ = next;
      for (u32 s = 0; s <= target_; ++s) {
        Stage& stage = stages_[s];
        if (!stage.running || stage.at > now_) continue;
        stage.running = false;
        append(s);
        stage.asked = s > 0;  // after every step, whether drafts were rejected or not
      }
    }
    return write(results);
  }

  double synchronous(Results results) {
    const u32 lead = setting_.lookahead > 0 ? setting_.lookahead - 1 : 0;
    for (const Stage& s : stages_) now_ = std::max(now_, s.at);
    while (!complete()) {
      for (u32 s = 0; s <= target_; ++s) {
        if (s > 0) step(s, drafts_for(s));
        if (s == target_) break;
        while (length(s) < length(s + 1) + lead) step(s, 0);
      }
      for (u32 s = 0; s < target_; ++s) roll_back(s, target_);
    }
    return write(results);
  }

 private:
  struct Stage {
    std::vector<std::int32_t> out;
    bool running = false;
    double at = 0.0;       // running: when the step ends; else: no look before
    bool asked = false;    // its request to upstream is not yet acknowledged
    bool cascade = false;  // has served downstream; continues when its own request is acknowledged
    std::vector<std::int32_t> draft_tokens;  // of the running step
    std::size_t same = 0;  // positions known to equal those of the stage downstream
    StageResult result;
  };

  std::size_t length(u32 s) const { return stages_[s].out.size(); }
  bool complete() const { return length(target_) > setting_.tokens; }

  // Positions over which stage s and the one downstream agree.
  std::size_t same(u32 s) {
    Stage& up = stages_[s];
    const Stage& down = stages_[s + 1];
    const std::size_t common = std::min(up.out.size(), down.out.size());
    while (up.same < common && up.out[up.same] == down.out[up.same]) ++up.same;
    return std::min(up.same, common);
  }

  // Equal over the common length: all stays, and a bonus token is not adopted. Else: a copy.
  void roll_back(u32 s, u32 from) {
    Stage& stage = stages_[s];
    const std::vector<std::int32_t>& truth = stages_[from].out;
    const std::size_t common = std::min(stage.out.size(), truth.size());
    std::size_t differs = same(s);
    for (u32 t = s + 1; t < from; ++t) differs = std::min(differs, same(t));
    while (differs < common && stage.out[differs] == truth[differs]) ++differs;
    if (differs >= common) return;
    ++stage.result.rollbacks;
    stage.out.resize(differs);
    stage.out.insert(stage.out.end(), truth.begin() + static_cast<std::ptrdiff_t>(differs),
                     truth.end());
    stage.same = std::min(stage.same, differs);
    if (s > 0) stages_[s - 1].same = std::min(stages_[s - 1].same, differs);
  }

  u32 drafts_for(u32 s) {
    if (s == 0 || length(s - 1) < length(s) || same(s - 1) < length(s)) return 0;
    return static_cast<u32>(std::min<std::size_t>(length(s - 1) - length(s), kReferenceCap - 1));
  }

  void prepare(u32 s, u32 num_draft_tokens) {
    Stage& stage = stages_[s];
    stage.draft_tokens.clear();
    if (num_draft_tokens > 0) {
      const auto from = stages_[s - 1].out.begin() + static_cast<std::ptrdiff_t>(length(s));
      stage.draft_tokens.assign(from, from + num_draft_tokens);
    }
  }
  double duration(u32 s) const {
    return step_time(setting_.models[s], 1 + static_cast<u32>(stages_[s].draft_tokens.size()));
  }

  void append(u32 s) {
    Stage& stage = stages_[s];
    const auto num_draft_tokens = static_cast<u32>(stage.draft_tokens.size());
    u32 accepted = 0;
    while (true) {
      const auto index = static_cast<u32>(stage.out.size()) - 1;
      stage.out.push_back(oracle_.next(s, index, stage.out.back()));
      if (accepted == num_draft_tokens || stage.out.back() != stage.draft_tokens[accepted]) break;
      ++accepted;
    }
    ++stage.result.steps;
    stage.result.drafted += num_draft_tokens;
    stage.result.accepted += accepted;
    ++stage.result.histogram[accepted + 1];
  }

  void step(u32 s, u32 num_draft_tokens) {
    prepare(s, num_draft_tokens);
    now_ += duration(s);
    append(s);
  }

  // One turn of a stage's polling loop. Returns whether anything changed.
  bool look(u32 s) {
    Stage& stage = stages_[s];
    if (stage.asked) return false;
    bool changed = false;
    if (stage.cascade) {
      stage.cascade = false;
      changed = true;
    } else if (s < target_ && stages_[s + 1].asked) {
      roll_back(s, s + 1);
      stages_[s + 1].asked = false;
      stages_[s + 1].at = now_ + setting_.handshake_s;
      if (s > 0) {
        stage.asked = stage.cascade = true;
        return true;
      }
      changed = true;
    }
    if (s > 0 && length(s - 1) + 1 < length(s) + setting_.lookahead) return changed;
    prepare(s, drafts_for(s));
    stage.running = true;
    stage.at = now_ + duration(s);
    return true;
  }

  double write(Results results) const {
    for (u32 s = 0; s <= target_; ++s) results[s] = stages_[s].result;
    return now_;
  }

  const Setting& setting_;
  u32 target_;
  Oracle oracle_;
  std::vector<Stage> stages_;
  double now_ = 0.0;
};

}  // namespace
}  // namespace pipespec::perf

// `schedule` 0: asynchronous, 1: the published asynchronous schedule, 2: the published lockstep.
// Returns the seconds, or -1 with a `message` of at most 256 bytes.
extern "C" double pipespec_simulate(std::uint32_t schedule, const pipespec::perf::Setting* setting,
                                    pipespec::perf::StageResult* stages, char* message) {
  using namespace pipespec::perf;
  const Results results(stages, setting->n_stages);
  try {
    if (schedule == 0) return Workers(*setting).run(results);
    Reference reference(*setting);
    return schedule == 1 ? reference.asynchronous(results) : reference.synchronous(results);
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), 255);
    return -1.0;
  }
}
