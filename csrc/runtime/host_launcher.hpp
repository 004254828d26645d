// A launcher without a GPU: a thread replaces the stream of each stage, and a function replaces the
// model. For tests, and for forwards on the host.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "launcher.hpp"

namespace pipespec {

class HostLauncher final : public Launcher {
 public:
  // Input and output of a model in one step. Row r feeds tokens[r * width + i] at position
  // kv[r] + i for i < query_lens[r], of which the last num_draft_tokens[r] are draft tokens; the
  // rest is padding. Where n_select[r] > 0 the model writes to selected[r * width + j] its choice
  // after j accepted draft tokens, at least up to the first draft token that differs from it.
  struct Rectangle {
    std::uint32_t rows;
    std::uint32_t width;
    const std::int32_t* tokens;
    const std::int32_t* kv;
    const std::int32_t* query_lens;
    const std::int32_t* num_draft_tokens;
    const std::int32_t* n_select;
    std::int32_t* selected;
  };
  // Called by the stage's thread. An exception is the failure of the step.
  using Model = std::function<void(const Rectangle&)>;

  using Widths = std::vector<std::uint32_t>;

  // `block` outlives the launcher, and the caller resets it. There is one model and one list of
  // widths per stage (an empty list: the stage's steps are part of another's). `shadowed`: the
  // scheduler sees a copy of the block that is as late as a GPU's. Throws std::invalid_argument.
  HostLauncher(void* block, std::vector<Model> models, std::vector<Widths> widths, bool shadowed);
  ~HostLauncher() override;
  HostLauncher(const HostLauncher&) = delete;
  HostLauncher& operator=(const HostLauncher&) = delete;

  Block shadow() const override { return shadow_; }
  const Widths& widths(std::uint32_t stage) const override { return widths_[stage]; }
  std::uint32_t depth() const override { return kDepth; }
  std::int64_t patrol_ns() const override { return 1'000'000'000; }
  void begin(Notice notice) override;
  void end() override;
  void leave() override { end(); }
  void settle() override;
  void launch(std::uint32_t stage, const StepPolicy& policy) override;
  std::uint64_t ended(std::uint32_t stage) override;
  Outcome outcome(std::uint32_t stage, std::uint64_t n) const override;
  void set_alive(std::uint32_t stage, bool alive) override;
  void set_limit(std::uint32_t row, std::uint32_t limit) override;

 private:
  static constexpr std::uint32_t kDepth = 8;

  struct Lane {
    Model model;
    std::mutex mutex;  // of what follows, but for the thread
    std::condition_variable queued, idle;
    std::deque<StepPolicy> queue;  // the first one is under way
    Notice notice;
    std::uint64_t ended = 0;
    Outcome outcomes[kDepth] = {};
    bool failed = false;
    std::string cause;
    bool closed = false;
    std::thread thread;
  };
  struct Free {
    void operator()(char* memory) const;
  };

  void close();
  void serve(std::uint32_t stage);
  Outcome step(std::uint32_t stage, const StepPolicy& policy) const;

  pid_t process_;
  Block block_;
  std::unique_ptr<char, Free> shadow_memory_;
  Block shadow_;
  std::vector<Widths> widths_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace pipespec
