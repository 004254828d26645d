// Random tasks for chains of fake models, and invariants that hold under every launcher.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/host_launcher.hpp"
#include "runtime/scheduler.hpp"
#include "tasks.hpp"

namespace chains {

using namespace pipespec;
using fake::Model;
using fake::Random;
using fake::Tokens;
using fake::Truth;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline constexpr std::int64_t kSecond = 1'000'000'000;

inline u64 threads_of_this_process() {
  // ThreadSanitizer adds a thread of its own when we start the first one.
  static const bool first = (std::thread([] {}).join(), true);
  (void)first;
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<u64>(std::distance(begin(tasks), end(tasks)));
}

// A thread that has been joined may still be listed for a moment.
inline bool threads_are(u64 expected) {
  check::eventually([&] { return threads_of_this_process() == expected; });
  return CHECK_EQ(threads_of_this_process(), expected);
}

// A task whose stages take their time.
struct Task : fake::Task {
  std::vector<u32> pauses_us;  // per stage: the longest duration of a step; 0: none

  Task(u32 stages, u32 rows, u32 length, u64 of) : fake::Task(stages, rows, length, of) {
    Random random{of + 1};
    for (u32 s = 0; s < stages; ++s) pauses_us.push_back(random.pick({0u, 0u, 3u, 30u}));
  }
};

// A long generation with drafts that are always right.
struct LongTask : Task {
  LongTask(u32 stages, u32 rows, u64 of, u32 length = 60) : Task(stages, rows, 1, of) {
    truth.eos_rate = 0;
    for (u32 r = 0; r < rows; ++r) limits[r] = static_cast<u32>(prompts[r].size()) + length;
    for (Model& model : models) model.accuracy = 1.0;
  }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Called before every forward that feeds something, with the stage and the number of the step. It
// may throw.
using Hook = std::function<void(u32 stage, u32 step)>;

// A chain of fake models. It has no launcher.
class Models {
 public:
  using Rectangle = HostLauncher::Rectangle;

  // `block`: the block that the stages use; `home`: the host's, which is reset before a generation.
  Models(const Task& task, const Block& block, const Block& home, Hook before)
      : task_(task),
        stages_(static_cast<u32>(task.models.size())),
        block_(block),
        home_(home),
        before_(std::move(before)),
        caches_(stages_),
        steps_(stages_) {}

  void reset() {
    task_.reset(home_);
    for (u32 s = 0; s < stages_; ++s) {
      caches_[s] = task_.caches(s);
      steps_[s] = 0;
    }
  }

  const Block& block() const { return block_; }
  u32 steps(u32 stage) const { return steps_[stage]; }

  bool check_text(bool part = false) const { return task_.check_text(block(), part); }
  bool check_caches() const {
    for (u32 s = 0; s < stages_; ++s)
      if (!fake::check_caches(block(), s, caches_[s], task_.prompts)) return false;
    return true;
  }

  // Checks that the host shadow equals the block in everything that foresee() reads.
  bool check_shadow(const Block& shadow) const {
    for (u32 s = 0; s < stages_; ++s)
      for (u32 r = 0; r < task_.prompts.size(); ++r) {
        const Word word = Sequence(block(), s, r).word();
        const auto start = static_cast<u32>(task_.prompts[r].size());
        if (!CHECK_EQ(pack(Sequence(shadow, s, r).word()), pack(word))) return false;
        if (!CHECK_EQ(fake::tokens_of(shadow, s, r, start, word.length),
                      fake::tokens_of(block(), s, r, start, word.length)))
          return false;
        CHECK_EQ(Sequence(shadow, s, r).committed(), Sequence(block(), s, r).committed());
        CHECK_EQ(shadow.priv(s, r).kv, block().priv(s, r).kv);
        CHECK_EQ(shadow.priv(s, r).agreed, block().priv(s, r).agreed);
        CHECK_EQ(shadow.priv(s, r).seen_epoch, block().priv(s, r).seen_epoch);
      }
    return true;
  }

 protected:
  void forward(u32 stage, const Rectangle& r) {
    if (std::any_of(r.query_lens, r.query_lens + r.rows, [](std::int32_t n) { return n > 0; })) {
      const u32 step = steps_[stage]++;
      if (before_) before_(stage, step);
      Random random{fake::mix(task_.seed * 64 + stage) + step};
      if (task_.pauses_us[stage] > 0 && random.below(3) == 0)
        usleep(random.below(task_.pauses_us[stage]));
    }
    fake::forward(caches_[stage],
                  {r.tokens, r.kv, r.query_lens, r.num_draft_tokens, r.n_select, r.width},
                  r.selected, r.width);
  }

  const Task& task_;
  const u32 stages_;

 private:
  Block block_, home_;
  Hook before_;
  std::vector<fake::Caches> caches_;
  std::vector<std::atomic<u32>> steps_;
};

inline std::vector<u32> any_lookahead(u32 stages, Random& random) {
  std::vector<u32> out;
  for (u32 s = 0; s + 1 < stages; ++s) out.push_back(random.pick({0u, 1u, 3u, 8u, 20u, ~0u}));
  return out;
}

inline Options any_options(Random& random) {
  return {.ahead = 1 + random.below(4), .trace = random.pick({0u, 3u, 1000u})};
}

inline std::vector<u32> any_widths(Random& random) {
  return random.pick({std::vector<u32>{1, 2, 4, 8, 16}, {1}, {2, 8}, {5}, {1, 32}});
}

}  // namespace chains
