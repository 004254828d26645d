// The threads that walk along one row together: one on the host, a warp on a device
// (cuda/warp.hpp). All lanes run the same code with the same numbers. They differ in the positions
// that they load and store. Only one lane accesses the words that other stages write or wait for,
// so that all lanes take the same branch. A fence orders the accesses of the lane that runs it: all
// lanes do.
#pragma once

#include <cstdint>

#include "hd.hpp"

namespace pipespec {

struct OneLane {
  static constexpr std::uint32_t kCount = 1;
  [[nodiscard]] PIPESPEC_HD std::uint32_t index() const { return 0; }
  // Bit i: the argument of lane i.
  [[nodiscard]] PIPESPEC_HD std::uint32_t ballot(bool yes) const { return yes ? 1 : 0; }
  // The sum of the lanes' arguments.
  [[nodiscard]] PIPESPEC_HD std::uint32_t sum(std::uint32_t n) const { return n; }
  // A barrier: all accesses of all lanes before it come before all accesses after it.
  PIPESPEC_HD void sync() const {}
  // Lane 0 runs `work`, and all lanes get its result. It is ordered with their accesses before and
  // after.
  template <typename Work>
  PIPESPEC_HD auto once(const Work& work) const {
    return work();
  }
};

// The lowest bit that is set in a ballot.
PIPESPEC_HD inline std::uint32_t lowest(std::uint32_t ballot) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__ffs(static_cast<int>(ballot))) - 1;
#else
  return static_cast<std::uint32_t>(__builtin_ctz(ballot));
#endif
}

}  // namespace pipespec
