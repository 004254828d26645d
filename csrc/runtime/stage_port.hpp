// One stage's access to the block, for all rows of a batch: plan() fills one rectangle of tokens to
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
  // Movable, not copyable: arrays_ points to the vectors' data, which keeps its address in a move.
  StagePort(StagePort&&) = default;
  // `width`: columns of the rectangle, i.e. the maximum of tokens one row feeds in one step.
  StagePort(const Block& block, std::uint32_t stage, std::uint32_t width)
      : block_(block), stage_(stage), width_(width), bells_(block_, stage) {
    if (stage >= block_.stages()) throw std::invalid_argument("the block has no such stage");
    if (width < 1) throw std::invalid_argument("width must be at least 1");
    const std::size_t rows = block_.rows();
    tokens_.resize(rows * width);
    query_lens_.resize(rows);
    n_select_.resize(rows);
    num_draft_tokens_.resize(rows);
    kv_.resize(rows);
    action_.resize(rows);
    arrays_ = {tokens_.data(),           kv_.data(),       query_lens_.data(),
               num_draft_tokens_.data(), n_select_.data(), action_.data()};
  }

  // The action of all rows together. kStep: something is to be fed (see query_lens,
  // num_draft_tokens, kv, tokens and columns()). kWait: some row waits for more draft tokens (never
  // with min_draft_tokens 0). Else kIdle or kFinished.
  Action plan(std::uint32_t lookahead, std::uint32_t max_draft_tokens,
              std::uint32_t min_draft_tokens) {
    if (trace_ != nullptr) planned_ns_ = now_ns();
    bells_.note();
    const StepPolicy policy{lookahead, max_draft_tokens, min_draft_tokens, width_};
    const std::uint32_t active = block_.active_rows();
    if (block_.header().rows != block_.rows() || block_.header().capacity != block_.capacity())
      throw std::logic_error(
          "the state block has grown, or something has overwritten it: make a new port");
    bool waits = false, works = false, all_finished = true;
    columns_ = 0;
    for (std::uint32_t row = 0; row < active; ++row) {
      const Word before = Sequence(block_, stage_, row).word();
      const Step step = plan_row(block_, stage_, row, policy, arrays_);
      published_ |= pack(before) != pack(Sequence(block_, stage_, row).word());
      columns_ = detail::max(columns_, step.query_len);
      waits |= step.action == Action::kWait;
      works |= step.query_len > 0;
      all_finished &= step.action == Action::kFinished;
    }
    // The neighbours must see the rollback or adoption of plan().
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

  // Whether the planned step selects tokens in some row.
  bool selects() const {
    const std::size_t active = block_.active_rows();
    for (std::size_t row = 0; row < active && row < n_select_.size(); ++row)
      if (n_select_[row] > 0) return true;
    return false;
  }

  // `selected`: [active rows, at least columns()] as verify() gives it, `stride` elements apart.
  // Returns tokens appended.
  std::uint32_t commit(const std::int32_t* selected, std::int64_t stride) {
    std::uint32_t appended = 0;
    const std::uint32_t active = block_.active_rows();
    for (std::uint32_t row = 0; row < active; ++row)
      appended += commit_row(block_, stage_, row, width_, arrays_, selected + row * stride);
    bells_.ring();
    if (trace_ != nullptr) record(columns_);
    return appended;
  }

  // Also returns true when the generation or the lookahead is no longer the one that generation()
  // or lookahead() last returned: a stage reads them before plan() notes the bells, and must not
  // sleep through a stop or at an old bound if they change in between.
  bool park(std::int64_t timeout_ns) {
    if (asked_ && load_acquire(&block_.header().generation) != generation_) return true;
    if (is_bounded_ && load_acquire(&block_.control(stage_).lookahead) != lookahead_) return true;
    return bells_.park(timeout_ns);
  }
  void ring() { bells_.ring(); }

  // The caller's present limits: this stage's lookahead, and that of its upstream.
  std::uint32_t lookahead() {
    is_bounded_ = true;
    return lookahead_ = load_acquire(&block_.control(stage_).lookahead);
  }
  std::uint32_t upstream_lookahead() const {
    return stage_ == 0 ? 0 : load_acquire(&block_.control(stage_ - 1).lookahead);
  }
  // Sleeps while the lookahead is 0 and the generation is the one that generation() last returned.
  void pause(std::int64_t timeout_ns) const {
    // start(0) stores the generation first: if the generation ended before this load, the lookahead
    // is open.
    if (timeout_ns <= 0 || load_acquire(&block_.header().generation) != generation_) return;
    futex_wait(&block_.control(stage_).lookahead, 0, timeout_ns);
  }

  // The number of the generation that should run, 0 for none.
  std::uint32_t generation() {
    asked_ = true;
    return generation_ = load_acquire(&block_.header().generation);
  }

  // From here on each step writes an entry to `buffer`, and so does each plan that rolls back
  // without a step; null: no entries. `buffer` belongs to this stage and outlives the port.
  void trace(TraceBuffer* buffer) { trace_ = buffer; }

  std::uint32_t rows() const { return block_.rows(); }
  std::uint32_t width() const { return width_; }
  std::uint32_t columns() const { return columns_; }
  std::vector<std::int32_t>& tokens() { return tokens_; }
  std::vector<std::int32_t>& kv() { return kv_; }
  std::vector<std::int32_t>& query_lens() { return query_lens_; }
  std::vector<std::int32_t>& num_draft_tokens() { return num_draft_tokens_; }
  std::vector<std::int32_t>& n_select() { return n_select_; }

 private:
  TraceTotals totals() const {
    TraceTotals sum{};
    for (std::uint32_t row = 0; row < block_.active_rows(); ++row) {
      const Counters& c = block_.priv(stage_, row).counters;
      sum.fed += load_relaxed(&c.fed);
      sum.draft_tokens += load_relaxed(&c.drafted);
      sum.accepted += load_relaxed(&c.accepted);
      sum.rolled_back += load_relaxed(&c.truncated);
      sum.rollbacks += load_relaxed(&c.rollbacks);
    }
    return sum;
  }

  // The changes since the last entry, so that the entries add up to the counters even if a forward
  // fails between plan() and commit().
  void record(std::uint32_t columns) {
    const TraceTotals now = totals();
    TraceTotals& before = trace_->recorded();
    const auto since = [](std::uint64_t a, std::uint64_t b) {
      return static_cast<std::uint32_t>(a - b);
    };
    trace_->write({trace_->written(), planned_ns_, start_ns_, now_ns(), columns,
                   since(now.fed, before.fed), since(now.draft_tokens, before.draft_tokens),
                   since(now.accepted, before.accepted), since(now.rolled_back, before.rolled_back),
                   0, since(now.rollbacks, before.rollbacks), 0});
    before = now;
  }
  void record_rollback() {
    if (totals().rollbacks != trace_->recorded().rollbacks) record(0);
  }

  Block block_;
  std::uint32_t stage_;
  std::uint32_t width_;
  Bells bells_;
  bool published_ = false;
  bool asked_ = false;
  std::uint32_t generation_ = 0;
  bool is_bounded_ = false;
  std::uint32_t lookahead_ = 0;
  std::uint32_t columns_ = 0;
  TraceBuffer* trace_ = nullptr;
  std::int64_t planned_ns_ = 0, start_ns_ = 0;  // of the present step
  std::vector<std::int32_t> tokens_, kv_, query_lens_, num_draft_tokens_, n_select_, action_;
  StepArrays arrays_;  // the vectors' data
};

}  // namespace pipespec
