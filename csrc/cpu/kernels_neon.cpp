// The inner kernels for NEON.
#include "kernels.hpp"

// The formats of the lanes come before the algorithms that use them.
#include "lanes_neon.hpp"
//
#include "kernels_impl.hpp"

namespace pipespec::cpu {
namespace {

struct DecoderNeon : Neon {
  static constexpr int kTileColumns = 6;
  using Int8 = cpu::Int8;

  static void pin(F&) {}

  static F sum_each(const F (&x)[kLanes]) { return sums_of_lanes<Neon>(x); }
};

constexpr Kernels kKernels = table<Neon, V16, V32, DecoderNeon>("neon");

}  // namespace

const Kernels* neon_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
