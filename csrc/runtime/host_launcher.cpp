#include "host_launcher.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "../protocol/commit.hpp"
#include "../protocol/replicate.hpp"
#include "clock.hpp"
#include "generation.hpp"

namespace pipespec {

void HostLauncher::Free::operator()(char* memory) const {
  ::operator delete(memory, std::align_val_t{kLine});
}

HostLauncher::HostLauncher(void* block, std::vector<Model> models, std::vector<Widths> widths,
                           bool shadowed)
    : process_(getpid()), block_(attach(block)), shadow_(block_), widths_(std::move(widths)) {
  if (models.size() != block_.stages() || widths_.size() != block_.stages())
    throw std::invalid_argument("the block has " + std::to_string(block_.stages()) +
                                " stages, but there are " + std::to_string(models.size()) +
                                " models, and widths of " + std::to_string(widths_.size()));
  for (const Widths& own : widths_)
    if ((!own.empty() && own.front() < 1) ||
        std::adjacent_find(own.begin(), own.end(), std::greater_equal<>()) != own.end())
      throw std::invalid_argument("widths must be positive numbers, ascending");
  if (widths_.back().empty()) throw std::invalid_argument("the target needs widths");
  if (shadowed) {
    shadow_memory_.reset(
        static_cast<char*>(::operator new(block_.header().bytes, std::align_val_t{kLine})));
    std::memcpy(shadow_memory_.get(), &block_.header(), block_.header().bytes);
    shadow_ = Block(shadow_memory_.get());
  }
  for (Model& model : models) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->model = std::move(model);
  }
  try {
    for (std::uint32_t s = 0; s < lanes_.size(); ++s)
      lanes_[s]->thread = std::thread([this, s] { serve(s); });
  } catch (...) {
    close();
    throw;
  }
}

HostLauncher::~HostLauncher() { close(); }

void HostLauncher::close() {
  if (process_ != getpid()) {
    // In a fork of the process that made this object, the threads are the parent's, and may hold
    // the locks.
    for (auto& lane : lanes_) static_cast<void>(lane.release());
    lanes_.clear();
    return;
  }
  for (const auto& lane : lanes_) {
    {
      const std::lock_guard lock(lane->mutex);
      lane->closed = true;
    }
    lane->queued.notify_one();
  }
  for (const auto& lane : lanes_)
    if (lane->thread.joinable()) lane->thread.join();
}

void HostLauncher::begin(Notice notice) {
  settle();
  if (shadow_memory_) std::memcpy(shadow_memory_.get(), &block_.header(), block_.header().bytes);
  for (const auto& lane : lanes_) {
    const std::lock_guard lock(lane->mutex);
    lane->notice = notice;
    lane->ended = 0;
    lane->failed = false;
  }
}

void HostLauncher::end() {
  for (const auto& lane : lanes_) {
    const std::lock_guard lock(lane->mutex);  // held during the call of `notice`
    lane->notice = nullptr;
  }
}

void HostLauncher::settle() {
  if (process_ != getpid()) return;  // the threads are the parent's
  for (const auto& lane : lanes_) {
    std::unique_lock lock(lane->mutex);
    lane->idle.wait(lock, [&] { return lane->queue.empty(); });
  }
}

void HostLauncher::launch(std::uint32_t stage, const StepPolicy& policy) {
  Lane& lane = *lanes_[stage];
  {
    const std::lock_guard lock(lane.mutex);
    if (lane.failed) throw std::runtime_error(lane.cause);
    lane.queue.push_back(policy);
  }
  lane.queued.notify_one();
}

std::uint64_t HostLauncher::ended(std::uint32_t stage) {
  Lane& lane = *lanes_[stage];
  const std::lock_guard lock(lane.mutex);
  if (lane.failed) throw std::runtime_error(lane.cause);
  return lane.ended;
}

Outcome HostLauncher::outcome(std::uint32_t stage, std::uint64_t n) const {
  Lane& lane = *lanes_[stage];
  const std::lock_guard lock(lane.mutex);
  return lane.outcomes[n % kDepth];
}

void HostLauncher::set_alive(std::uint32_t stage, bool alive) {
  for (const Block& block : {block_, shadow_})
    store_release(&block.control(stage).alive, alive ? 1u : 0u);
}

void HostLauncher::set_limit(std::uint32_t row, std::uint32_t limit) {
  for (const Block& block : {block_, shadow_}) store_release(&block.span(row).limit, limit);
}

void HostLauncher::serve(std::uint32_t stage) {
  Lane& lane = *lanes_[stage];
  std::unique_lock lock(lane.mutex);
  while (true) {
    lane.queued.wait(lock, [&] { return lane.closed || !lane.queue.empty(); });
    if (lane.closed) return;
    const StepPolicy policy = lane.queue.front();
    lock.unlock();
    Outcome outcome{};
    std::string cause;
    bool failed = true;
    try {
      outcome = step(stage, policy);
      failed = false;
    } catch (const std::exception& error) {
      cause = error.what();
    } catch (...) {
      cause = "it threw something that is no std::exception";
    }
    lock.lock();
    if (failed) {
      lane.failed = true;
      lane.cause = std::move(cause);
      lane.queue.clear();
    } else {
      lane.queue.pop_front();
      lane.outcomes[lane.ended++ % kDepth] = outcome;
    }
    if (lane.notice) lane.notice(stage);
    if (lane.queue.empty()) lane.idle.notify_all();
  }
}

// The kernels of csrc/cuda/ in a loop over the rows.
Outcome HostLauncher::step(std::uint32_t stage, const StepPolicy& policy) const {
  const std::uint32_t rows = block_.header().active_rows, width = policy.width;
  Outcome out{now_ns(), 0, 0, 0, 0, 0, 0};
  std::vector<Step> steps(rows);
  std::vector<std::int32_t> tokens(std::size_t{rows} * width), selected(tokens.size());
  std::vector<std::int32_t> kv(rows), query_lens(rows), num_draft_tokens(rows), n_select(rows);
  for (std::uint32_t row = 0; row < rows; ++row) {
    const Counters& counters = block_.priv(stage, row).counters;
    const std::uint64_t before = load_relaxed(&counters.truncated);
    const std::uint64_t rollbacks = load_relaxed(&counters.rollbacks);
    const Step step = steps[row] =
        plan(block_, stage, row, policy, &tokens[std::size_t{row} * width]);
    kv[row] = static_cast<std::int32_t>(step.kv);
    query_lens[row] = static_cast<std::int32_t>(step.query_len);
    num_draft_tokens[row] = static_cast<std::int32_t>(step.num_draft_tokens);
    n_select[row] = step.action == Action::kStep ? query_lens[row] : 0;
    out.fed += step.query_len;
    out.draft_tokens += step.num_draft_tokens;
    out.rolled_back += static_cast<std::uint32_t>(load_relaxed(&counters.truncated) - before);
    out.rollbacks += static_cast<std::uint32_t>(load_relaxed(&counters.rollbacks) - rollbacks);
  }
  if (out.fed > 0)
    lanes_[stage]->model({rows, width, tokens.data(), kv.data(), query_lens.data(),
                          num_draft_tokens.data(), n_select.data(), selected.data()});
  for (std::uint32_t row = 0; row < rows; ++row) {
    const Counters& counters = block_.priv(stage, row).counters;
    const std::uint64_t before = load_relaxed(&counters.accepted);
    commit(block_, stage, row, steps[row], &tokens[std::size_t{row} * width],
           &selected[std::size_t{row} * width]);
    out.accepted += static_cast<std::uint32_t>(load_relaxed(&counters.accepted) - before);
    if (shadow_memory_) replicate(block_, shadow_, stage, row, row + 1);
  }
  out.end_ns = now_ns();
  return out;
}

}  // namespace pipespec
