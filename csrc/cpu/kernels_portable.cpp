// The inner kernels for any CPU: 16-byte vectors that the compiler turns into SSE2, NEON or plain
// code.
#include "kernels.hpp"

// The formats of the lanes come before the algorithms that use them.
#include "lanes_portable.hpp"
//
#include "kernels_impl.hpp"

namespace pipespec::cpu {
namespace {

template <class LaneT, class ULaneT>
struct PortableVector {
  using Lane = LaneT;
  typedef LaneT Reg __attribute__((vector_size(16)));
  typedef ULaneT UReg __attribute__((vector_size(16)));
  static constexpr int kLanes = 16 / int(sizeof(Lane));
  static constexpr Lane kLowest = Lane(ULaneT(1) << (8 * sizeof(Lane) - 1));
  static constexpr Lane kHighest = Lane(~kLowest);

  static Reg load(const unsigned char* p) {
    Reg x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(void* p, Reg x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static Reg broadcast(Lane x) { return x - Reg{}; }
  static Reg max_signed(Reg a, Reg b) { return a > b ? a : b; }
  static Reg min_signed(Reg a, Reg b) { return a < b ? a : b; }

  using Watch = Reg;  // all ones where a NaN with a sign bit was
  static Watch unseen() { return Reg{}; }
  static Watch see(Watch w, Reg x, Reg neg_inf) { return w | Reg(UReg(x) > UReg(neg_inf)); }
  static Watch join(Watch a, Watch b) { return a | b; }
  static bool saw_nan(Watch w, Reg) { return any(w); }

  static Reg bit_and(Reg a, Reg b) { return a & b; }
  static bool any(Reg mask) {
    uint64_t half[2];
    __builtin_memcpy(half, &mask, sizeof(mask));
    return (half[0] | half[1]) != 0;
  }
  static int first(Reg mask) {
    if (!any(mask)) return -1;
    int i = 0;
    while (mask[i] == 0) ++i;
    return i;
  }
  static bool any_greater(Reg a, Reg b) { return any(Reg(a > b)); }
  static int first_equal(Reg a, Reg b) { return first(Reg(a == b)); }
  static int first_greater(Reg a, Reg b) { return first(Reg(a > b)); }
};

using V16 = PortableVector<int16_t, uint16_t>;
using V32 = PortableVector<int32_t, uint32_t>;

struct DecoderPortable : Portable {
  static constexpr int kTileColumns = 3;

  static void pin(F&) {}

  static F sum_each(const F (&x)[kLanes]) { return sums_of_lanes<Portable>(x); }

  struct Int8 {
    static constexpr int kBytes = 1;
    static F load(const unsigned char* p) {
      typedef int8_t Four __attribute__((vector_size(4)));
      Four x;
      __builtin_memcpy(&x, p, sizeof(x));
      return __builtin_convertvector(x, F);
    }
  };
};

constexpr Kernels kKernels = table<Portable, V16, V32, DecoderPortable>("portable");

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace pipespec::cpu
