#include "scheduler.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "../protocol/ring.hpp"
#include "clock.hpp"

namespace pipespec {
namespace {

using u32 = std::uint32_t;

// A stage with nothing in flight is woken by its neighbours. This bounds the cost of a lost notice.
constexpr std::int64_t kNap = 1'000'000'000;
constexpr std::int64_t kLongest = 1'000 * kNap;  // of wait(): sums must not overflow

// Whether the row's text has ended in this stage's sequence.
bool has_ended(const Block& block, const Sequence& sequence, u32 row, u32 length) {
  const RowSpan& span = block.span(row);
  return length >= load_acquire(&span.limit) ||
         (length > load_relaxed(&span.start) && block.is_eos(sequence.token(length - 1)));
}

}  // namespace

Scheduler::Scheduler(std::shared_ptr<Launcher> launcher, const Options& options,
                     const std::vector<u32>& lookahead)
    : launcher_(std::move(launcher)), options_(options) {
  if (!launcher_) throw std::invalid_argument("a scheduler needs a launcher");
  if (options.ahead < 1 || options.ahead > launcher_->depth())
    throw std::invalid_argument("ahead must be 1 to " + std::to_string(launcher_->depth()) +
                                ", not " + std::to_string(options.ahead));
  target_ = launcher_->shadow().target();
  if (rides(target_)) throw std::invalid_argument("the target needs steps of its own");
  for (u32 s = 0; s <= target_; ++s) {
    lanes_.push_back(std::make_unique<Lane>());
    if (options.trace > 0) lanes_[s]->trace = std::make_unique<TraceBuffer>(options.trace);
    if (!rides(s)) lanes_[s]->scratch.resize(widest(s));
    target_alone_ &= rides(s) || s == target_;
  }
  steer(lookahead);
}

Scheduler::~Scheduler() { stop(); }

void Scheduler::start() {
  if (started_) throw std::logic_error("a generation runs already; stop() it or finish() it");
  failures_.clear();
  for (const auto& lane : lanes_) {
    lane->in_flight.clear();
    lane->ended = 0;
    if (lane->trace != nullptr) lane->trace->clear();
  }
  target_steps_ = 0;
  leaves_ = ends_rows_ = false;
  launcher_->begin([this](u32 stage) { noticed(stage); });
  for (u32 s = 0; s <= target_; ++s) launcher_->set_alive(s, true);
  over_ = false;
  started_ = true;
  process_ = getpid();
  for (u32 s = 0; s <= target_; ++s) {
    if (rides(s)) continue;
    try {
      lanes_[s]->thread = std::thread([this, s] { run_stage(s); });
    } catch (...) {
      stop();
      throw;
    }
  }
}

Scheduler::Progress Scheduler::wait(std::uint64_t steps, std::int64_t timeout_ns) {
  const std::int64_t deadline = now_ns() + std::min(timeout_ns, kLongest);
  while (true) {
    const u32 heard = caller_.note();
    const bool running = !over_;
    if (running && process_ != getpid())
      throw std::runtime_error("a forked process cannot go on with the call of its parent");
    const std::uint64_t ended = target_steps_;
    const std::int64_t left = deadline - now_ns();
    if (!running || ended > steps || left <= 0) return {ended, running};
    caller_.sleep(heard, left);
  }
}

void Scheduler::request_stop() {
  over_ = true;
  ring_all();
}

void Scheduler::stop() {
  request_stop();
  join();
}

void Scheduler::finish() {
  while (wait(std::numeric_limits<std::uint64_t>::max(), kNap).running) {
  }
  stop();
  for (const StageFailure& failure : failures())
    if (failure.stage == target_) throw TargetFailed(failure);
}

void Scheduler::join() {
  if (!started_) return;
  started_ = false;
  if (process_ != getpid()) {
    // The threads are the parent's.
    for (const auto& lane : lanes_) static_cast<void>(new std::thread(std::move(lane->thread)));
    return;
  }
  for (const auto& lane : lanes_)
    if (lane->thread.joinable()) lane->thread.join();
  leaves_ ? launcher_->leave() : launcher_->end();
}

void Scheduler::settle() {
  if (started_) throw std::logic_error("a generation runs: stop() it or finish() it");
  launcher_->settle();
  if (!leaves_ || process_ != getpid()) return;
  drain(target_);
  leaves_ = false;
}

void Scheduler::steer(const std::vector<u32>& lookahead) {
  if (lookahead.size() != target_)
    throw std::invalid_argument("a chain of " + std::to_string(target_ + 1) + " needs " +
                                std::to_string(target_) + " lookahead values, not " +
                                std::to_string(lookahead.size()));
  for (u32 s = 0; s < target_; ++s) lanes_[s]->lookahead = lookahead[s];
  ring_all();
}

void Scheduler::end_row(u32 row) {
  const Block block = launcher_->shadow();
  if (row >= block.header().active_rows) throw std::invalid_argument("there is no such row");
  ends_rows_ = true;
  launcher_->set_limit(row, Sequence(block, target_, row).word().length);
  ring_all();
}

std::vector<StageFailure> Scheduler::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

std::vector<TraceEntry> Scheduler::trace(u32 stage) const {
  if (stage > target_) throw std::invalid_argument("there is no such stage");
  const TraceBuffer* buffer = lanes_[stage]->trace.get();
  return buffer == nullptr ? std::vector<TraceEntry>{} : buffer->read();
}

// --- the next step -------------------------------------------------------------------------------

u32 Scheduler::bucket(u32 stage, u32 columns) const {
  const std::vector<u32>& widths = launcher_->widths(stage);
  const auto fits = std::lower_bound(widths.begin(), widths.end(), columns);
  return fits == widths.end() ? widths.back() : *fits;
}

// The present policy with the widest step, or that of the draft tokens that ride in the target's.
// No stage waits for draft tokens: they may never come.
StepPolicy Scheduler::policy(u32 stage) const {
  const u32 lookahead = stage < target_ ? lanes_[stage]->lookahead.load() : 0;
  const u32 draft_tokens = stage > 0 ? lanes_[stage - 1]->lookahead.load() : 0;
  const bool rounds = stage == target_ && target_alone_;
  const u32 width =
      rounds ? bucket(stage, 1 + std::min(draft_tokens, widest(stage) - 1)) : widest(stage);
  return {lookahead, std::min(draft_tokens, width - 1), 0, width};
}

// While the stage has nothing in flight: foresee() reads its private state.
Scheduler::Outlook Scheduler::look(u32 stage, const StepPolicy& policy) {
  const Block block = launcher_->shadow();
  Outlook out;
  for (u32 row = 0; row < block.header().active_rows; ++row) {
    const Step step = foresee(block, stage, row, policy, lanes_[stage]->scratch.data());
    out.works |= step.query_len > 0;
    out.finished &= step.action == Action::kFinished;
    out.columns = std::max(out.columns, step.query_len);
  }
  return out;
}

Scheduler::Decision Scheduler::decide(u32 stage) {
  const Lane& lane = *lanes_[stage];
  StepPolicy now = policy(stage);
  const bool is_target = stage == target_;
  if ((!is_target && now.lookahead == 0) || lane.in_flight.size() >= options_.ahead)
    return {Decision::kSleep};
  if (!lane.in_flight.empty()) {
    if (!is_target) return decide_ahead(stage, now);
    // With drafts, the next step is known when the last one has verified.
    return target_alone_ ? decide_target_ahead(now) : Decision{Decision::kSleep};
  }
  const Outlook outlook = look(stage, now);
  if (!outlook.works)
    return {is_target && outlook.finished ? Decision::kFinished : Decision::kSleep};
  if (!is_target || !target_alone_) now.width = bucket(stage, outlook.columns);
  return {Decision::kLaunch, now};
}

// One more step after those in flight, unless these complete every row with one token each. If the
// rows are complete already, those find nothing to do, unless the caller has ended a row: they may
// not know that yet.
Scheduler::Decision Scheduler::decide_target_ahead(const StepPolicy& now) const {
  const Block block = launcher_->shadow();
  bool finished = true;
  for (u32 row = 0; row < block.header().active_rows; ++row) {
    const Sequence own(block, target_, row);
    const u32 length = own.word().length;
    if (has_ended(block, own, row, length)) continue;
    finished = false;
    if (load_acquire(&block.span(row).limit) - length > lanes_[target_]->in_flight.size())
      return {Decision::kLaunch, now};
  }
  return {finished && !ends_rows_ ? Decision::kFinished : Decision::kSleep};
}

// One more step after those in flight, from published words only, if there is room for it even when
// they append as much as they can. It is as wide as the draft tokens that they leave. After a
// correction the stage catches up in several steps.
Scheduler::Decision Scheduler::decide_ahead(u32 stage, StepPolicy now) const {
  const Block block = launcher_->shadow();
  u32 growth = 0;
  for (const Launched& step : lanes_[stage]->in_flight) growth += step.growth;
  u32 columns = 0;
  for (u32 row = 0; row < block.header().active_rows; ++row) {
    const Sequence own(block, stage, row), target(block, target_, row);
    const u32 length = own.word().length, truth = target.word().length;
    if (has_ended(block, own, row, length) || has_ended(block, target, row, truth)) continue;
    const u32 reached = std::max(truth, Sequence(block, stage + 1, row).word().length);
    const u32 limit = load_acquire(&block.span(row).limit);
    const u32 bound =
        reached < limit && now.lookahead < limit - reached ? reached + now.lookahead : limit;
    if (length >= bound || bound - length <= growth) continue;
    const u32 offered = stage > 0 ? Sequence(block, stage - 1, row).word().length : 0;
    const u32 draft_tokens = offered > length + growth ? offered - length - growth : 0;
    columns = std::max(columns, 1 + std::min(draft_tokens, now.max_draft_tokens));
  }
  if (columns == 0) return {Decision::kSleep};
  now.width = bucket(stage, columns);
  return {Decision::kLaunch, now};
}

// --- one thread per stage ------------------------------------------------------------------------

void Scheduler::run_stage(u32 stage) {
  Lane& lane = *lanes_[stage];
  try {
    while (true) {
      const u32 heard = lane.bell.note();
      harvest(stage);
      if (over_ && lane.in_flight.empty()) return;
      Decision decision = over_ ? Decision{Decision::kSleep} : decide(stage);
      if (decision.what == Decision::kLaunch) {
        launch(stage, decision.policy);
        continue;
      }
      if (decision.what == Decision::kFinished) {
        leaves_ = !lane.in_flight.empty();
        // A step publishes its tokens before it ends: one of these may have the last ones.
        target_steps_ += lane.in_flight.size();
        request_stop();
        return;
      }
      lane.bell.sleep(heard, lane.in_flight.empty() ? kNap : launcher_->patrol_ns());
    }
  } catch (const std::exception& error) {
    fail(stage, error.what());
  }
}

void Scheduler::launch(u32 stage, const StepPolicy& policy) {
  Lane& lane = *lanes_[stage];
  const auto before = static_cast<u32>(lane.in_flight.size());
  lane.in_flight.push_back(
      {now_ns(), policy.width, 1 + std::min(policy.max_draft_tokens, policy.width - 1), before});
  try {
    launcher_->launch(stage, policy);
  } catch (...) {
    lane.in_flight.pop_back();
    throw;
  }
}

// Records the steps that have ended.
void Scheduler::harvest(u32 stage) {
  Lane& lane = *lanes_[stage];
  if (lane.in_flight.empty()) return;
  for (const std::uint64_t ended = launcher_->ended(stage); lane.ended < ended; ++lane.ended) {
    const Launched launched = lane.in_flight.front();
    lane.in_flight.pop_front();
    const Outcome outcome = launcher_->outcome(stage, lane.ended);
    if (lane.trace != nullptr)
      lane.trace->write({lane.ended, launched.at_ns, outcome.start_ns, outcome.end_ns,
                         launched.width, outcome.fed, outcome.draft_tokens, outcome.accepted,
                         outcome.rolled_back, launched.in_flight, outcome.rollbacks, 0});
    if (stage != target_ || leaves_) continue;  // those that are left count already
    ++target_steps_;
    caller_.ring();
  }
}

// A failed draft costs speed, a failed target ends the text.
void Scheduler::fail(u32 stage, const std::string& cause) {
  drain(stage);
  {
    const std::lock_guard lock(mutex_);
    failures_.push_back({stage, cause});
  }
  launcher_->set_alive(stage, false);
  if (stage == target_) over_ = true;
  ring_all();
}

// What was launched before a failing launch() may still run.
void Scheduler::drain(u32 stage) {
  Lane& lane = *lanes_[stage];
  try {
    while (true) {
      const u32 heard = lane.bell.note();
      harvest(stage);
      if (lane.in_flight.empty()) return;
      lane.bell.sleep(heard, launcher_->patrol_ns());
    }
  } catch (const std::exception&) {
    lane.in_flight.clear();  // ended() guarantees it; failures() reports the first cause
  }
}

// A step of `stage` has ended: its neighbours may have new draft tokens or a correction, and every
// stage follows the target.
void Scheduler::noticed(u32 stage) {
  const u32 first = stage == 0 || stage == target_ ? 0 : stage - 1;
  for (u32 s = first; s <= std::min(stage + 1, target_); ++s) lanes_[s]->bell.ring();
}

void Scheduler::ring_all() {
  for (const auto& lane : lanes_) lane->bell.ring();
  caller_.ring();
}

}  // namespace pipespec
