// A stage's end of the block, for all rows of a batch: plan() fills one rectangle of tokens to
// feed, commit() takes the selections for it, park() sleeps until a neighbour has published.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "../protocol/rectangle.hpp"
#include "clock.hpp"
#include "park.hpp"
#include "trace.hpp"

namespace pipespec {

class StagePort {
 public:
  // Moved, not copied: arrays_ points into the vectors, whose data moves along.
  StagePort(StagePort&&) = default;
  // `width`: columns of the rectangle, i.e. the most tokens one row feeds in one step.
  StagePort(void* block, std::uint32_t stage, std::uint32_t width)
      : block_(block), stage_(stage), width_(width), bells_(block_, stage) {
    if (block_.header().magic != kMagic)
      throw std::invalid_argument("this memory holds no pipespec state block");
    if (stage >= block_.stages()) throw std::invalid_argument("the block has no such stage");
    if (width < 1) throw std::invalid_argument("width must be at least 1");
    const std::size_t rows = block_.rows();
    tokens_.resize(rows * width);
    n_fed_.resize(rows);
    n_select_.resize(rows);
    n_hint_.resize(rows);
    kv_.resize(rows);
    action_.resize(rows);
    arrays_ = {tokens_.data(), kv_.data(),       n_fed_.data(),
               n_hint_.data(), n_select_.data(), action_.data()};
  }

  // What the rows together should do: kStep when anything is to be fed (n_fed, n_hint, kv, tokens
  // and columns() tell what); kWait when some row would rather wait for more hints (with min_hints
  // 0 never); else kIdle or kFinished.
  Action plan(std::uint32_t window, std::uint32_t max_hints, std::uint32_t min_hints) {
    if (trace_ != nullptr) planned_ns_ = now_ns();
    bells_.note();
    const Policy policy{window, max_hints, min_hints, width_};
    const std::uint32_t active = block_.header().active_rows;
    bool waits = false, works = false, all_finished = true;
    columns_ = 0;
    for (std::uint32_t row = 0; row < active; ++row) {
      const Word before = Sequence(block_, stage_, row).word();
      const Step step = plan_row(block_, stage_, row, policy, arrays_);
      published_ |= pack(before) != pack(Sequence(block_, stage_, row).word());
      columns_ = detail::max(columns_, step.n_fed);
      waits |= step.action == Action::kWait;
      works |= step.n_fed > 0;
      all_finished &= step.action == Action::kFinished;
    }
    // What plan() took back or adopted is news for the neighbours.
    if (published_) bells_.ring();
    published_ = false;
    const Action action = waits          ? Action::kWait
                          : works        ? Action::kStep
                          : all_finished ? Action::kFinished
                                         : Action::kIdle;
    if (trace_ != nullptr) {
      start_ns_ = now_ns();
      if (action != Action::kStep) record_rollback();
    }
    return action;
  }

  // `selected`: [active rows, at least columns()] as verify() gives it, `stride` elements apart.
  // Returns tokens appended.
  std::uint32_t commit(const std::int32_t* selected, std::int64_t stride) {
    std::uint32_t appended = 0;
    const std::uint32_t active = block_.header().active_rows;
    for (std::uint32_t row = 0; row < active; ++row)
      appended += commit_row(block_, stage_, row, width_, arrays_, selected + row * stride);
    bells_.ring();
    if (trace_ != nullptr) record(columns_);
    return appended;
  }

  // Also returns true when the generation is no longer the one that generation() last told: a stage
  // looks at it before plan() notes the bells, and must not sleep through a stop in between.
  bool park(std::int64_t timeout_ns, std::uint32_t awaited = 0) {
    if (asked_ && load_acquire(&block_.header().generation) != generation_) return true;
    return bells_.park(timeout_ns, awaited);
  }
  void ring() { bells_.ring(); }

  // What the caller allows at this moment: this stage's run-ahead, and hints of its upstream.
  std::uint32_t window() const { return load_acquire(&block_.control(stage_).window); }
  std::uint32_t upstream_window() const {
    return stage_ == 0 ? 0 : load_acquire(&block_.control(stage_ - 1).window);
  }
  // Sleeps while the window is 0, and the generation the one that generation() last told.
  void pause(std::int64_t timeout_ns) const {
    // The order of start(0): a generation that is over before this look leaves an open window.
    if (timeout_ns <= 0 || load_acquire(&block_.header().generation) != generation_) return;
    futex_wait(&block_.control(stage_).window, 0, timeout_ns);
  }

  // The number of the generation that should run, 0 for none.
  std::uint32_t generation() {
    asked_ = true;
    return generation_ = load_acquire(&block_.header().generation);
  }
  void set_step_ns(std::uint32_t ns) { store_relaxed(&block_.control(stage_).step_ns, ns); }

  // From here on each step leaves an entry there, and each plan that takes tokens back without one;
  // null: none does. `buffer` is this stage's, and outlives the port.
  void trace(TraceBuffer* buffer) { trace_ = buffer; }

  std::uint32_t rows() const { return block_.rows(); }
  std::uint32_t width() const { return width_; }
  std::uint32_t columns() const { return columns_; }
  std::vector<std::int32_t>& tokens() { return tokens_; }
  std::vector<std::int32_t>& kv() { return kv_; }
  std::vector<std::int32_t>& n_fed() { return n_fed_; }
  std::vector<std::int32_t>& n_hint() { return n_hint_; }
  std::vector<std::int32_t>& n_select() { return n_select_; }

 private:
  TraceTotals totals() const {
    TraceTotals sum{};
    for (std::uint32_t row = 0; row < block_.header().active_rows; ++row) {
      const Counters& c = block_.priv(stage_, row).counters;
      sum.fed += load_relaxed(&c.fed);
      sum.hints += load_relaxed(&c.drafted);
      sum.accepted += load_relaxed(&c.accepted);
      sum.taken_back += load_relaxed(&c.truncated);
      sum.rollbacks += load_relaxed(&c.rollbacks);
    }
    return sum;
  }

  // What has happened since the entry before, so that the entries add up to the counters even if a
  // forward fails between plan() and commit().
  void record(std::uint32_t columns) {
    const TraceTotals now = totals();
    TraceTotals& told = trace_->told();
    const auto since = [](std::uint64_t a, std::uint64_t b) {
      return static_cast<std::uint32_t>(a - b);
    };
    trace_->write({trace_->written(), planned_ns_, start_ns_, now_ns(), columns,
                   since(now.fed, told.fed), since(now.hints, told.hints),
                   since(now.accepted, told.accepted), since(now.taken_back, told.taken_back), 0,
                   since(now.rollbacks, told.rollbacks), 0});
    told = now;
  }
  void record_rollback() {
    if (totals().rollbacks != trace_->told().rollbacks) record(0);
  }

  Block block_;
  std::uint32_t stage_;
  std::uint32_t width_;
  Bells bells_;
  bool published_ = false;
  bool asked_ = false;
  std::uint32_t generation_ = 0;
  std::uint32_t columns_ = 0;
  TraceBuffer* trace_ = nullptr;
  std::int64_t planned_ns_ = 0, start_ns_ = 0;  // of the present step
  std::vector<std::int32_t> tokens_, kv_, n_fed_, n_hint_, n_select_, action_;
  StepArrays arrays_;  // the vectors' data
};

}  // namespace pipespec
