// Drives the stages of one generation in one process: decides when a stage takes a step, how wide
// the step is, and when the stage sleeps. No Python, no spinning. The launcher defines what a step
// is.
//
// There is one thread per stage. A stage with nothing in flight applies the protocol's plan() to
// the host shadow without changing it (foresee()) and launches the narrowest step that fits. A
// draft may launch further steps while one runs.
//
// The host shadow may be late. Then a step has less or more to do than foreseen, which costs time
// but does not change the text: it depends on the target's forwards alone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "doorbell.hpp"
#include "launcher.hpp"
#include "trace.hpp"

namespace pipespec {

struct Options {
  // The largest number of steps of a draft in flight. It also holds for the target if no draft is
  // launched: then its next step is known before the last one has ended. Its width is that of
  // the draft tokens that the last draft may be ahead, see steer().
  std::uint32_t ahead = 1;
  std::uint32_t trace = 0;  // entries per stage that are kept; 0: none are written
};

struct StageFailure {
  std::uint32_t stage;
  std::string cause;
};

// The target failed: there is no more text.
class TargetFailed : public std::runtime_error {
 public:
  explicit TargetFailed(const StageFailure& failure)
      : std::runtime_error("the target (stage " + std::to_string(failure.stage) +
                           ") failed: " + failure.cause) {}
};

class Scheduler {
 public:
  struct Progress {
    std::uint64_t steps;  // of the target that have ended
    bool running;         // false: the text is complete, or stopped, or the target failed
  };

  // `lookahead`: per draft, tokens that it may be ahead of the next stage; 0: it rests. Throws
  // std::invalid_argument on settings that make no sense.
  Scheduler(std::shared_ptr<Launcher> launcher, const Options& options,
            const std::vector<std::uint32_t>& lookahead);
  ~Scheduler();  // stops
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Starts the generation that the block was reset for. Throws std::logic_error while one runs.
  void start();
  // Whether a generation was started and neither stop() nor finish() has returned.
  bool started() const { return started_; }
  // While no generation runs: waits for the steps that the last one has left, whose trace follows.
  // Before the block is reset: they write to the shadow as they end.
  void settle();
  // Sleeps until the target has ended more than `steps` steps, until nothing runs, or until the
  // timeout. By one thread at a time.
  Progress wait(std::uint64_t steps, std::int64_t timeout_ns);
  // Launches no further step. Returns at once. Any thread may call it, also one of the launcher.
  void request_stop();
  // request_stop(), then waits until the steps under way have ended and no thread is left.
  void stop();
  // Waits for the end of the text, then as stop(), but for steps of the target that were launched
  // before the end was known and find nothing to do: see settle(). Throws TargetFailed.
  void finish();

  // Holds from the next decision on. Any thread.
  void steer(const std::vector<std::uint32_t>& lookahead);
  // The row ends where the target stands. Any thread, while a generation runs.
  void end_row(std::uint32_t row);
  // Stages that failed in this generation, in the order of their failures. Any thread.
  std::vector<StageFailure> failures() const;
  // Entries of the present or last generation; empty when nothing is traced. Any thread, but not
  // during start().
  std::vector<TraceEntry> trace(std::uint32_t stage) const;

 private:
  struct Launched {
    std::int64_t at_ns;
    std::uint32_t width;
    std::uint32_t growth;  // maximum of tokens that it can append to a row
    std::uint32_t in_flight;
  };
  // One per stage; touched by the thread that runs it, but for the bell and the lookahead.
  struct Lane {
    Doorbell bell;
    std::atomic<std::uint32_t> lookahead{0};
    std::deque<Launched> in_flight;
    std::uint64_t ended = 0;
    std::vector<std::int32_t> scratch;
    std::unique_ptr<TraceBuffer> trace;
    std::thread thread;
  };
  // The combined action of a stage's rows.
  struct Outlook {
    bool works = false;    // some row feeds something
    bool finished = true;  // every row is complete
    std::uint32_t columns = 0;
  };
  struct Decision {
    enum { kLaunch, kSleep, kFinished } what;
    StepPolicy policy{};
  };

  bool rides(std::uint32_t stage) const { return launcher_->widths(stage).empty(); }
  std::uint32_t widest(std::uint32_t stage) const { return launcher_->widths(stage).back(); }
  std::uint32_t bucket(std::uint32_t stage, std::uint32_t columns) const;
  StepPolicy policy(std::uint32_t stage) const;
  Outlook look(std::uint32_t stage, const StepPolicy& policy);

  void run_stage(std::uint32_t stage);
  Decision decide(std::uint32_t stage);
  Decision decide_target_ahead(const StepPolicy& now) const;
  Decision decide_ahead(std::uint32_t stage, StepPolicy now) const;

  void launch(std::uint32_t stage, const StepPolicy& policy);
  void harvest(std::uint32_t stage);
  void drain(std::uint32_t stage);
  void fail(std::uint32_t stage, const std::string& cause);
  void noticed(std::uint32_t stage);
  void ring_all();
  void join();

  std::shared_ptr<Launcher> launcher_;
  Options options_;
  std::uint32_t target_;
  bool target_alone_ = true;  // its next step never depends on the last one
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<bool> over_{true};
  bool leaves_ =
      false;  // steps that find nothing to do are in flight; the target's thread writes it
  std::atomic<bool> ends_rows_{false};  // the caller has ended one before its time
  std::atomic<std::uint64_t> target_steps_{0};
  Doorbell caller_;
  std::atomic<bool> started_{false};
  pid_t process_ = 0;         // that started it
  mutable std::mutex mutex_;  // of failures_
  std::vector<StageFailure> failures_;
};

}  // namespace pipespec
