// The inner kernels for any CPU: 16-byte vectors that the compiler turns into SSE2, NEON or plain
// code.
#include "kernels.hpp"

// The formats of the lanes come before the algorithms that use them.
#include "lanes_portable.hpp"
//
#include "kernels_impl.hpp"

namespace pipespec::cpu {
namespace {

struct DecoderPortable : Portable {
  static constexpr int kTileColumns = 3;
  using Int8 = cpu::Int8;

  static void pin(F&) {}

  static F sum_each(const F (&x)[kLanes]) { return sums_of_lanes<Portable>(x); }
};

constexpr Kernels kKernels = table<Portable, V16, V32, DecoderPortable>("portable");

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
