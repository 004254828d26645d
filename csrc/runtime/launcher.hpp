// The interface between the scheduler and the steps that it launches: threads that call a function
// on the host (host_launcher.hpp), or captured graphs on a GPU (cuda/launcher.hpp). A step is plan
// -> forward -> select -> commit on the block. The scheduler reads only a host shadow of the block,
// the number of steps that have ended, and their outcomes.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "../protocol/plan.hpp"

namespace pipespec {

// What one step did, summed over its rows. Times are those of CLOCK_MONOTONIC.
struct Outcome {
  std::int64_t start_ns;
  std::int64_t end_ns;
  std::uint32_t fed;           // tokens; 0: the step found nothing to do
  std::uint32_t draft_tokens;  // how many of them were draft tokens
  std::uint32_t accepted;      // draft tokens that survived
  std::uint32_t rolled_back;   // tokens rolled back by corrections from downstream
  std::uint32_t rollbacks;     // number of rollbacks
};

// Steps of one stage run in the order of their launches, those of different stages at the same
// time. launch(), ended() and outcome() of one stage are called by one thread at a time, the rest
// by any.
class Launcher {
 public:
  using Notice = std::function<void(std::uint32_t stage)>;

  virtual ~Launcher() = default;

  // The block as the host sees it. A stage's part is as its last ended step left it, or newer.
  virtual Block shadow() const = 0;
  // The widths that a step of this stage may have, ascending. Empty: the stage has no steps of its
  // own because another stage's step contains them; it is never launched. The target has at least
  // one.
  virtual const std::vector<std::uint32_t>& widths(std::uint32_t stage) const = 0;
  // The largest number of steps of one stage in flight.
  virtual std::uint32_t depth() const = 0;
  // Notices can be lost or late: after so many nanoseconds without one, the scheduler calls
  // ended().
  virtual std::int64_t patrol_ns() const = 0;

  // Before the first launch of a generation, when the block has been reset. `notice` is called
  // whenever ended() has grown or would throw; by any thread, so it must neither wait nor throw.
  virtual void begin(Notice notice) = 0;
  // After the last step has ended. `notice` is not called any more.
  virtual void end() = 0;
  // As end(), without a wait for the steps in flight, which find nothing to do.
  virtual void leave() = 0;
  // Waits for the steps that leave() has left; begin() does so, too. Does not throw.
  virtual void settle() = 0;

  // Queues a step; policy.width is one of widths(). Throws if the launch fails.
  virtual void launch(std::uint32_t stage, const StepPolicy& policy) = 0;
  // Steps of the stage that have ended since begin(). If one has failed, throws its cause; the
  // steps queued after it are dropped, and none runs any more.
  virtual std::uint64_t ended(std::uint32_t stage) = 0;
  // Of step number n since begin(), one of the last depth() that ended.
  virtual Outcome outcome(std::uint32_t stage, std::uint64_t n) const = 0;

  // The caller's words, in the block and in its host shadow. set_alive() does not throw.
  virtual void set_alive(std::uint32_t stage, bool alive) = 0;
  virtual void set_limit(std::uint32_t row, std::uint32_t limit) = 0;
};

}  // namespace pipespec
