#include "perf_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "generation.hpp"
#include "stage_port.hpp"

namespace pipespec::perf {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr u32 kReferenceCap = 100;  // the reference feeds at most this many tokens per verification

u64 mix(u64 x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}
void require_time(double seconds, bool positive, const std::string& what) {
  require(std::isfinite(seconds) && (positive ? seconds > 0.0 : seconds >= 0.0),
          what + " must be a " + (positive ? "positive" : "non-negative") +
              " number of seconds, not " + std::to_string(seconds));
}

// Texts as trees: a token's id stands for the path through the tree that led to it. kTrue is the
// target's token after the target's own text; any other id is a hash of the position, the token
// before and the class of the answer, so equal ids mean equal texts up to there.
constexpr std::int32_t kTrue = 0;
constexpr std::int32_t kNone = -1;  // an n-gram index without a match

class Oracle {
 public:
  Oracle(const Answers& answers, u32 stages, u32 tokens, u64 seed, bool ngram = false)
      : table_(answers.table),
        confidence_(answers.confidence),
        target_(stages - 1),
        tokens_(tokens),
        seed_(mix(seed + 1)),
        ngram_(ngram) {
    require(answers.acceptance.empty() != answers.table.empty() || stages == 1,
            "give either acceptance rates or a table of answers");
    if (!table_.empty())
      require(table_.size() % target_ == 0,
              "the table of answers needs one column per draft: " + std::to_string(table_.size()) +
                  " entries are not rows of " + std::to_string(target_));
    else
      require(answers.acceptance.size() == target_,
              "one acceptance rate per pair of neighbours: " + std::to_string(target_) + ", not " +
                  std::to_string(answers.acceptance.size()));
    for (const double a : answers.acceptance) {
      require(a >= 0.0 && a <= 1.0,
              "an acceptance rate is a probability, not " + std::to_string(a));
      // 2^64 does not fit, so certainty is one step below it. The flag keeps exact certainty.
      threshold_.push_back(a >= 1.0 ? ~u64{0} : static_cast<u64>(std::ldexp(a, 64)));
      certain_.push_back(a >= 1.0);
    }
    positions_ = table_.empty() ? 0 : table_.size() / target_;
    require(confidence_.empty() || confidence_.size() == table_.size(),
            "the table of confidences needs an entry for each entry of the table of answers");
  }

  // How sure `stage` is of next() with the same arguments.
  std::uint8_t confidence(u32 stage, u32 row, u32 index, std::int32_t prev) const {
    if (confidence_.empty() || stage == target_) return 0;
    return confidence_[entry_of(stage, row, index, prev == kTrue, node_of(row, index, prev))];
  }

  // The choice of `stage` at the `index`-th generated position of `row`, after the token `prev`.
  std::int32_t next(u32 stage, u32 row, u32 index, std::int32_t prev) const {
    if (prev == kTrue && stage == target_) return kTrue;
    const u64 node = node_of(row, index, prev);
    const u32 answer = answer_of(stage, row, index, prev == kTrue, node);
    if (prev == kTrue && answer == 0) return kTrue;
    if (prev == kTrue && answer == kNothing) return kNone;
    return static_cast<std::int32_t>(mix(node + answer * kOdd) >> 33) + 1;  // 1 .. 2^31
  }

  // Whether the only draft is right after the target's own text.
  bool right(u32 row, u32 index) const {
    return answer_of(0, row, index, true, mix(seed_ ^ (u64{row} << 32 | index))) == 0;
  }

 private:
  static constexpr u64 kOdd = 0x9e3779b97f4a7c15u;

  u64 node_of(u32 row, u32 index, std::int32_t prev) const {
    const u64 node = mix(seed_ ^ (u64{row} << 32 | index));
    return prev == kTrue ? node : mix(node ^ static_cast<u64>(static_cast<u32>(prev)) * kOdd);
  }
  // Of the tables.
  u64 entry_of(u32 stage, u32 row, u32 index, bool on_path, u64 node) const {
    const u64 position = on_path ? u64{row} * tokens_ + index : mix(node);
    return position % positions_ * target_ + stage;
  }

  u32 answer_of(u32 stage, u32 row, u32 index, bool on_path, u64 node) const {
    if (stage == target_) return 0;
    // A text with a wrong token is new: no stage chooses what followed it elsewhere.
    if (ngram_ && stage == 0 && !on_path) return kNothing;
    if (positions_ > 0) return table_[entry_of(stage, row, index, on_path, node)];
    // A stage's class is named after the last stage, going downstream, that still agrees with it.
    u32 s = stage;
    while (s < target_ && (certain_[s] || mix(node + (s + 1) * kOdd) < threshold_[s])) ++s;
    return target_ - s;
  }

  const std::vector<std::uint8_t>& table_;
  const std::vector<std::uint8_t>& confidence_;
  std::vector<u64> threshold_;
  std::vector<bool> certain_;
  u32 target_;
  u32 tokens_;
  u64 positions_ = 0;
  u64 seed_;
  bool ngram_;
};

void check(const Setting& setting) {
  require(!setting.stages.empty() && setting.stages.size() <= kMaxStages,
          "a chain has 1 to " + std::to_string(kMaxStages) + " stages, not " +
              std::to_string(setting.stages.size()));
  require(setting.tokens >= 1 && setting.tokens < (1u << 28), "tokens must be 1 to 2^28 - 1");
  require(setting.rows >= 1 && setting.rows < (1u << 16), "rows must be 1 to 65535");
  require(setting.width >= 2 && setting.width <= 4096, "width must be 2 to 4096");
  for (std::size_t s = 0; s < setting.stages.size(); ++s) {
    const StageModel& stage = setting.stages[s];
    const std::string name = "stage " + std::to_string(s) + ": ";
    require(!stage.step_s.empty(), name + "no step time");
    for (const double t : stage.step_s) require_time(t, true, name + "a step time");
    require_time(stage.start_s, false, name + "its start");
    require_time(stage.cold_s, false, name + "cold_s");
    require(std::isfinite(stage.sensitivity) && stage.sensitivity >= 0.0,
            name + "sensitivity must be a non-negative number");
    require(!stage.ngram || (s == 0 && setting.stages.size() > 1),
            name + "an n-gram index is the first draft of a chain");
  }
  require(std::isfinite(setting.contention) && setting.contention >= 0.0,
          "contention must be a non-negative number");
  require(setting.patience >= 0.0, "patience must not be negative");  // infinite is fine
  require_time(setting.wake_s, false, "wake_s");
  require_time(setting.late_s, false, "late_s");
  require_time(setting.handshake_s, false, "handshake_s");
  require(!setting.preempt || setting.rows == 1, "preempt is for one row");
  const bool ngram = setting.stages[0].ngram;
  const auto& table = setting.answers.table;
  const std::size_t drafts = setting.stages.size() - 1;
  for (std::size_t i = 0; drafts > 0 && i < table.size(); ++i)
    require(table[i] != kNothing || (ngram && i % drafts == 0),
            "255 in the table of answers is for an n-gram index");
}

double step_time(const StageModel& stage, u32 columns) {
  return stage.step_s[std::min<std::size_t>(columns, stage.step_s.size()) - 1];
}

u32 power_of_two(u32 n) {
  u32 p = 1;
  while (p < n) p *= 2;
  return p;
}

// The product's block and ports, with stages that choose the oracle's tokens.
class Chain {
 public:
  explicit Chain(const Setting& setting)
      : setting_(setting),
        target_(static_cast<u32>(setting.stages.size()) - 1),
        oracle_(setting.answers, target_ + 1, setting.tokens, setting.seed,
                setting.stages[0].ngram) {
    const u32 capacity = power_of_two(setting.tokens + 2);
    const std::size_t bytes = Block::bytes(target_ + 1, setting.rows, capacity);
    memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{kLine})));
    std::memset(memory_.get(), 0, bytes);
    block_ = Block::create(memory_.get(), target_ + 1, setting.rows, capacity);
    // The prompt is one token, the true one.
    const std::vector<u32> starts(setting.rows, kStart);
    const std::vector<u32> limits(setting.rows, kStart + setting.tokens);
    reset(block_, starts, limits, std::vector<std::int32_t>(setting.rows, kTrue), {});
    selected_.resize(std::size_t{setting.rows} * setting.width);
    confidence_.resize(selected_.size());
    busy_.resize(target_ + 1);
    ports_.reserve(target_ + 1);
    for (u32 s = 0; s <= target_; ++s) {
      block_.control(s).alive = !setting.stages[s].ngram;
      ports_.emplace_back(block_, s, setting.width);
      ports_.back().use_confidence(setting.confidence);
    }
  }

  const Block& block() const { return block_; }
  StagePort& port(u32 stage) { return ports_[stage]; }
  u32 target() const { return target_; }
  void add_busy(u32 stage, double seconds) { busy_[stage] += seconds; }

  Action plan(u32 stage, u32 min_draft_tokens) {
    const StageModel& model = setting_.stages[stage];
    return ports_[stage].plan(model.lookahead, model.max_draft_tokens, min_draft_tokens);
  }
  // What the target does next, where it goes by the confidence of the draft tokens.
  // `upstream_step_s`: see StagePort::choose().
  Choice choose(double upstream_step_s, bool may_wait) {
    const u32 most = setting_.stages[target_].max_draft_tokens;
    return ports_[target_].choose(policy_, most, upstream_step_s, may_wait);
  }
  Action plan_chosen(const Choice& choice, u32 min_draft_tokens) {
    const u32 most = choice.max_draft_tokens;
    return ports_[target_].plan(0, most, std::min(most, min_draft_tokens));
  }
  // After a step of the target, at `now`. `step_s`: see direct_drafts().
  void note_target_step(double took, double now, const std::vector<double>& step_s) {
    policy_.note_step(block_, ports_[target_].columns(), took, now);
    direct_drafts(block_, policy_, step_s);
  }
  Action plan_plain(u32 stage) {
    return ports_[stage].plan(setting_.stages[stage].lookahead, 0, 0);
  }
  double planned_time(u32 stage) const {
    return step_time(setting_.stages[stage], ports_[stage].columns());
  }

  // Returns false if no row appends anything, which only an n-gram index does.
  bool commit(u32 stage) {
    StagePort& port = ports_[stage];
    bool commits = false;
    const u32 width = port.width();
    for (u32 row = 0; row < setting_.rows; ++row) {
      if (port.n_select()[row] == 0) {
        commits |= port.query_lens()[row] > 0;
        continue;
      }
      const u32 num_draft_tokens = static_cast<u32>(port.num_draft_tokens()[row]);
      const u32 own = static_cast<u32>(port.query_lens()[row]) - num_draft_tokens;
      const std::int32_t* fed = &port.tokens()[std::size_t{row} * width];
      std::int32_t* selected = &selected_[std::size_t{row} * width];
      const u32 index = static_cast<u32>(port.kv()[row]) + own - kStart;
      for (u32 j = 0;; ++j) {
        selected[j] = oracle_.next(stage, row, index + j, fed[own + j - 1]);
        confidence_[std::size_t{row} * width + j] =
            oracle_.confidence(stage, row, index + j, fed[own + j - 1]);
        if (selected[j] == kNone) port.query_lens()[row] = 0;
        if (j == num_draft_tokens || selected[j] != fed[own + j]) break;
      }
      commits |= port.query_lens()[row] > 0;
    }
    if (commits)
      port.commit(selected_.data(), width, setting_.confidence ? confidence_.data() : nullptr);
    return commits;
  }

  // Before a step of `stage`: lets an n-gram index upstream draft as NgramStage::fill() does.
  // Returns its seconds.
  double fill_upstream_of(u32 stage) {
    if (stage != 1 || !setting_.stages[0].ngram) return 0.0;
    double seconds = 0.0;
    for (bool commits = true; commits && plan(0, 0) == Action::kStep;) {
      seconds += planned_time(0);
      commits = commit(0);
    }
    add_busy(0, seconds);
    return seconds;
  }

  // Whether the published tokens of others make the stage's running step useless. One row.
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

  Result result(double seconds) const {
    Result out{seconds, u64{setting_.tokens} * setting_.rows, {}};
    for (u32 s = 0; s <= target_; ++s) {
      StageResult stage;
      stage.busy_s = busy_[s];
      stage.histogram.resize(kHistogram + 1);
      for (u32 row = 0; row < setting_.rows; ++row) {
        const Counters& c = block_.priv(s, row).counters;
        stage.steps += c.steps;
        stage.drafted += c.drafted;
        stage.accepted += c.accepted;
        stage.adopted += c.adopted;
        stage.truncated += c.truncated;
        stage.rollbacks += c.rollbacks;
        for (u32 i = 0; i < kHistogram; ++i) stage.histogram[i + 1] += c.histogram[i];
      }
      const Calibration& learned = block_.calibration(s);
      stage.outcomes = learned.outcomes;
      stage.squared_error = static_cast<double>(learned.squared_error) * 0x1p-32;
      out.stages.push_back(std::move(stage));
    }
    return out;
  }

 private:
  static constexpr u32 kStart = 1;
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{kLine}); }
  };

  const Setting& setting_;
  u32 target_;
  Oracle oracle_;
  std::unique_ptr<char, Free> memory_;
  Block block_;
  std::vector<StagePort> ports_;
  std::vector<std::int32_t> selected_;
  std::vector<std::uint8_t> confidence_;  // of `selected_`
  std::vector<double> busy_;
  GainPolicy policy_;
};

// The `workers` driver: each stage polls, computes or sleeps by itself.
class Workers {
 public:
  explicit Workers(const Setting& setting) : setting_(setting), chain_(setting) {
    for (u32 s = 0; s < setting.stages.size(); ++s) {
      const StageModel& model = setting.stages[s];
      // The block keeps the mean of earlier generations: it is known from the start.
      runners_.push_back({State::kReady, model.start_s, 0.0, model.step_s[0], false, kNever});
      if (model.ngram) runners_.back() = {State::kInside, kNever, 0.0, 0.0, false, kNever};
    }
  }

  Result run() {
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
        if (runners_[s].state != State::kRunning && runners_[s].at <= now_ && look(s))
          return chain_.result(now_);
    }
  }

 private:
  enum class State { kReady, kRunning, kParked, kInside };  // kInside: part of stage 1
  struct Runner {
    State state;
    double at;  // running: when the step ends; ready: when it looks; parked: its deadline
    double began;
    double mean_step;  // as Stage.step() keeps it
    bool waiting;
    double deadline;
  };

  // The stages that run on a device.
  struct Load {
    u32 running = 0;
    bool target = false;
  };
  Load with(Load load, u32 s) const {
    return {load.running + 1, load.target || s == chain_.target()};
  }
  Load load_of(u32 device) const {
    Load load;
    for (u32 s = 0; s < runners_.size(); ++s)
      if (runners_[s].state == State::kRunning && setting_.stages[s].device == device)
        load = with(load, s);
    return load;
  }
  // How much longer a step of `s` lasts under a load that it is part of.
  double slowdown(u32 s, Load load) const {
    const u32 cores = setting_.cores > 0 ? setting_.cores : load.running;
    const u32 at_once = std::min(load.running, cores);
    const double contention = setting_.contention * setting_.stages[s].sensitivity;
    double turns = static_cast<double>(load.running) / at_once;
    if (load.running > cores && load.target && cores > 1)
      turns = s == chain_.target() ? 1.0 : static_cast<double>(load.running - 1) / (cores - 1);
    return (1.0 + contention * (at_once - 1)) * turns;
  }
  // The load of `device` changes from `before` to `after`: adjusts the stages that run on it.
  void stretch(u32 device, Load before, Load after) {
    for (u32 s = 0; s < runners_.size(); ++s) {
      Runner& r = runners_[s];
      if (r.state != State::kRunning || setting_.stages[s].device != device) continue;
      const double factor = slowdown(s, after) / slowdown(s, before);
      if (factor != 1.0) r.at = now_ + (r.at - now_) * factor;
    }
  }

  void begin(u32 s) {
    const u32 device = setting_.stages[s].device;
    const Load others = load_of(device), all = with(others, s);
    if (others.running > 0) stretch(device, others, all);
    Runner& r = runners_[s];
    r.state = State::kRunning;
    r.began = now_;
    double seconds = chain_.planned_time(s);
    if (s == 1) seconds += std::exchange(filled_s_, 0.0);
    r.at = now_ + seconds * slowdown(s, all);
  }
  void leave_device(u32 s) {
    Runner& r = runners_[s];
    r.state = State::kReady;
    r.at = now_;
    chain_.add_busy(s, now_ - r.began);
    const u32 device = setting_.stages[s].device;
    const Load others = load_of(device);
    if (others.running > 0) stretch(device, with(others, s), others);
  }

  void finish(u32 s) {
    Runner& r = runners_[s];
    leave_device(s);
    const double took = now_ - r.began;
    r.mean_step = 0.9 * r.mean_step + 0.1 * took;
    chain_.commit(s);
    if (setting_.confidence && s == chain_.target())
      chain_.note_target_step(took, now_, std::vector<double>(s, 0.0));
    wake_others(s);
    if (setting_.preempt)
      for (u32 u = 0; u < s; ++u)
        if (runners_[u].state == State::kRunning && chain_.contradicted(u)) leave_device(u);
    if (setting_.handshake_s > 0.0 && s > 0) {
      runners_[s].at = now_ + setting_.handshake_s;
      Runner& upstream = runners_[s - 1];
      if (upstream.state == State::kRunning)
        upstream.at += setting_.handshake_s;
      else
        upstream = {State::kReady,
                    now_ + setting_.handshake_s,
                    0.0,
                    upstream.mean_step,
                    upstream.waiting,
                    upstream.deadline};
    }
  }

  void wake_others(u32 s) {
    for (u32 t = 0; t < runners_.size(); ++t)
      if (t != s && runners_[t].state == State::kParked) {
        runners_[t].at = now_ + (cores_busy(t) ? setting_.late_s : setting_.wake_s);
        runners_[t].state = State::kReady;
      }
  }
  // Whether other stages occupy all cores of its device, including the stage that has just
  // published.
  bool cores_busy(u32 t) const {
    u32 awake = 0;
    for (u32 s = 0; s < runners_.size(); ++s)
      awake += runners_[s].state != State::kParked && runners_[s].state != State::kInside &&
               setting_.stages[s].device == setting_.stages[t].device;
    return setting_.cores > 0 && awake >= setting_.cores;
  }

  Action plan(u32 s, u32 min_draft_tokens) {
    if (setting_.confidence && s > 0 && s == chain_.target()) {
      const Runner& r = runners_[s];
      const Choice choice = chain_.choose(upstream_step_s(s), !r.waiting || now_ < r.deadline);
      awaited_s_ = choice.wait_s;
      return choice.awaited > 0 ? Action::kWait : chain_.plan_chosen(choice, min_draft_tokens);
    }
    const Action action = chain_.plan(s, min_draft_tokens);
    if (action == Action::kWait && setting_.decode_meanwhile) return chain_.plan_plain(s);
    return action;
  }

  double upstream_step_s(u32 s) const { return runners_[s - 1].mean_step; }

  // Returns whether all is done.
  bool look(u32 s) {
    Runner& r = runners_[s];
    const u32 bell = chain_.block().status(s).bell;
    u32 min_draft_tokens = setting_.stages[s].min_draft_tokens;
    if (r.waiting && now_ >= r.deadline) min_draft_tokens = 0;
    filled_s_ += chain_.fill_upstream_of(s);
    Action action = plan(s, min_draft_tokens);
    if (action == Action::kWait) {
      if (!r.waiting) {
        r.waiting = true;
        r.deadline = now_ + setting_.patience * std::max(min_draft_tokens * upstream_step_s(s),
                                                         std::exchange(awaited_s_, 0.0));
      }
      if (r.deadline <= now_) action = plan(s, 0);
    }
    if (chain_.block().status(s).bell != bell) wake_others(s);
    if (action == Action::kStep) {
      r.waiting = false;
      begin(s);
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
  double awaited_s_ = 0.0;  // that the target wants to wait
  double filled_s_ = 0.0;   // of the n-gram index since the last step of stage 1
};

// The published system, from its description: sequences that are copied, counters of requests and
// acknowledgements, a minimum lookahead.
class Reference {
 public:
  explicit Reference(const Setting& setting)
      : setting_(setting),
        target_(static_cast<u32>(setting.stages.size()) - 1),
        oracle_(setting.answers, target_ + 1, setting.tokens, setting.seed) {
    require(setting.rows == 1, "the reference schedule has one row only");
    require(target_ >= 1, "the reference needs a draft");
    require(!setting.stages[0].ngram, "the reference has no n-gram index");
    for (u32 s = 0; s <= target_; ++s) {
      Stage stage;
      // The prompt's last token, and the first token, which each stage takes from its own prefill.
      stage.out = {kTrue, oracle_.next(s, 0, 0, kTrue)};
      stage.at = setting.stages[s].start_s;
      stage.result.histogram.resize(kReferenceCap + 1);
      stages_.push_back(std::move(stage));
    }
  }

  Result asynchronous() {
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
    return result();
  }

  Result synchronous() {
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
    return result();
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
    stage.result.truncated += stage.out.size() - differs;
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
    stage.result.busy_s += duration(s);
  }
  double duration(u32 s) const {
    return step_time(setting_.stages[s], 1 + static_cast<u32>(stages_[s].draft_tokens.size()));
  }

  void append(u32 s) {
    Stage& stage = stages_[s];
    const auto num_draft_tokens = static_cast<u32>(stage.draft_tokens.size());
    u32 accepted = 0;
    while (true) {
      const auto index = static_cast<u32>(stage.out.size()) - 1;
      stage.out.push_back(oracle_.next(s, 0, index, stage.out.back()));
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

  Result result() const {
    Result out{now_, setting_.tokens, {}};
    for (const Stage& stage : stages_) out.stages.push_back(stage.result);
    return out;
  }

  const Setting& setting_;
  u32 target_;
  Oracle oracle_;
  std::vector<Stage> stages_;
  double now_ = 0.0;
};

}  // namespace

Result asynchronous(const Setting& setting) {
  check(setting);
  return Workers(setting).run();
}

Result lockstep(const Setting& setting) {
  check(setting);
  Chain chain(setting);
  double now = 0.0;
  for (const StageModel& stage : setting.stages) now = std::max(now, stage.start_s);
  std::vector<double> step_s(chain.target());  // mean per draft, as Stage.step() keeps it
  u32 last = chain.target();                   // that made a step
  double cold = 0.0;                           // for its next
  const auto advance = [&](const auto& self, u32 s) -> Action {
    now += chain.fill_upstream_of(s);
    if (s > 0 && !setting.stages[s - 1].ngram)
      while (self(self, s - 1) == Action::kStep) {
      }
    const bool chooses = setting.confidence && s > 0 && s == chain.target();
    const Action action =
        chooses ? chain.plan_chosen(chain.choose(0.0, false), 0) : chain.plan(s, 0);
    if (action == Action::kStep) {
      cold = s == last ? cold / 2 : setting.stages[s].cold_s;
      last = s;
      const double took = chain.planned_time(s) + cold;
      now += took;
      chain.add_busy(s, took);
      chain.commit(s);
      if (chooses) {
        chain.note_target_step(took, now, step_s);
      } else if (s < chain.target() && !setting.stages[s].ngram) {
        step_s[s] = step_s[s] == 0.0 ? took : 0.9 * step_s[s] + 0.1 * took;
      }
    }
    return action;
  };
  while (advance(advance, chain.target()) != Action::kFinished) {
  }
  return chain.result(now);
}

Result reference_async(const Setting& setting) {
  check(setting);
  return Reference(setting).asynchronous();
}

Result reference_sync(const Setting& setting) {
  check(setting);
  return Reference(setting).synchronous();
}

SpdResult spd(const SpdSetting& setting) {
  require(!setting.stage_s.empty() && setting.stage_s.size() <= 1024,
          "SPD needs 1 to 1024 stages, not " + std::to_string(setting.stage_s.size()));
  for (const double t : setting.stage_s) require_time(t, true, "the time of a stage");
  require_time(setting.draft_s, false, "draft_s");
  require_time(setting.cycle_s, false, "cycle_s");
  require(setting.tokens >= 1 && setting.tokens < (1u << 28), "tokens must be 1 to 2^28 - 1");
  require(setting.rows >= 1 && setting.rows < (1u << 16), "rows must be 1 to 65535");
  Answers answers;
  answers.table = setting.table;
  if (answers.table.empty()) answers.acceptance = {setting.acceptance};
  const Oracle oracle(answers, 2, setting.tokens, setting.seed);

  // Time of a cycle by the number of filled stages.
  const auto stages = static_cast<u32>(setting.stage_s.size());
  std::vector<double> cycle(stages + 1);
  double slowest = 0.0, sum = 0.0;
  for (u32 f = 1; f <= stages; ++f) {
    slowest = std::max(slowest, setting.stage_s[f - 1]);
    sum += setting.stage_s[f - 1];
    cycle[f] = setting.cycle_s +
               (setting.shared ? setting.draft_s + sum : std::max(setting.draft_s, slowest));
  }
  // All rows share their cycles: a cycle lasts as long as that of the fullest row.
  struct Row {
    u32 verified = 0;  // tokens
    u32 filled = 1;    // stages that hold a token
  };
  std::vector<Row> rows(setting.rows);
  SpdResult out;
  out.tokens = u64{setting.tokens} * setting.rows;
  for (u32 open = setting.rows; open > 0; ++out.cycles) {
    u32 fullest = 0;
    for (u32 r = 0; r < setting.rows; ++r) {
      Row& row = rows[r];
      if (row.verified == setting.tokens) continue;
      fullest = std::max(fullest, row.filled);
      if (row.filled < stages) {
        ++row.filled;
        continue;
      }
      // The oldest token leaves the pipe. If the draft after it is wrong, all younger ones are
      // discarded.
      if (!oracle.right(r, row.verified)) {
        row.filled = 1;
        ++out.flushes;
      }
      open -= ++row.verified == setting.tokens;
    }
    out.seconds += cycle[fullest];
  }
  return out;
}

}  // namespace pipespec::perf
