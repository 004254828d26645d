// A few parked threads that help one caller at a time. Host only, no OpenMP: a second OpenMP
// runtime would compete with torch's for the cores.
#pragma once

#include <cstdint>

namespace pipespec::cpu {

class Pool;

// The caller's hold on the pool for one job, a job being a few rounds of equal units of work. The
// caller works, too. It waits for units in progress and never for a helper that has not woken up.
// Without helpers (none asked for, pool in use by another thread, process exiting) every unit runs
// in the caller.
//
// Threads start when first asked for, block all signals, sleep on a condition variable between
// jobs, and are joined at process exit. A forked child starts its own.
class Team {
 public:
  using Work = void (*)(void* context, int64_t unit);
  static constexpr int64_t kMaxUnits = (int64_t{1} << 20) - 1;

  Team(int helpers, Work work, void* context);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs units 0 .. units-1 (at most kMaxUnits) and returns when all are done: what they wrote is
  // visible here, and what was written before this call is visible to them.
  void run(int64_t units);

 private:
  Work work_;
  void* context_;
  Pool* pool_ = nullptr;  // null: no helpers
};

// Helper threads alive in this process.
int pool_threads();

// Joins the helpers; later jobs run in their callers. Runs by itself at process exit.
void shutdown_pool();

}  // namespace pipespec::cpu
