// Units of work shared among threads, for callers whose work is a lambda.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool.hpp"

namespace pipespec::cpu {

// Runs work(0 .. units - 1) on `threads` threads, the calling one included.
template <typename Work>
void share(int threads, int64_t units, const Work& work) {
  struct Job {
    const Work& work;
    int64_t base;
  } job{work, 0};
  Team team(
      threads - 1,
      [](void* context, int64_t unit) {
        const Job& of = *static_cast<const Job*>(context);
        of.work(of.base + unit);
      },
      &job);
  for (; job.base < units; job.base += Team::kMaxUnits)
    team.run(std::min(units - job.base, Team::kMaxUnits));
}

}  // namespace pipespec::cpu
