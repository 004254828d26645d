// Decoder kernels for any CPU, see lanes_portable.hpp.
#include "lanes_portable.hpp"
// The formats of the lanes come before the algorithms that use them.
#include "decoder_impl.hpp"

namespace pipespec::cpu {
namespace {

struct DecoderPortable : Portable {
  static constexpr int kAccumulators = 12;
  static constexpr int kLeastPanels = 1;

  static void pin(F&) {}
  static F divide(F a, F b) { return a / b; }
  // Lane i: the sum of the lanes of x[i].
  static F sum_each(const F (&x)[4]) {
    F sums;
    for (int i = 0; i < 4; ++i) sums[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
    return sums;
  }

  struct Weights8 {
    static constexpr int64_t kBytes = 1;
    static void load(const unsigned char* p, F (&w)[4]) {
      typedef int8_t Four __attribute__((vector_size(4)));
      for (int i = 0; i < 4; ++i) {
        Four x;
        __builtin_memcpy(&x, p + 4 * i, sizeof(x));
        w[i] = __builtin_convertvector(x, F);
      }
    }
  };
  struct Weights16 {
    static constexpr int64_t kBytes = 2;
    static void load(const unsigned char* p, F (&w)[4]) {
      for (int i = 0; i < 2; ++i) {
        const I x = bits_of(Float32::load(p + 16 * i));
        w[i] = float_of(shift_left<16>(x));
        w[i + 2] = float_of(bit_and(x, broadcast(int32_t(0xFFFF0000))));
      }
    }
  };
  struct Weights32 {
    static constexpr int64_t kBytes = 4;
    static void load(const unsigned char* p, F (&w)[4]) {
      for (int i = 0; i < 4; ++i) w[i] = Float32::load(p + 16 * i);
    }
  };
};

constexpr DecoderKernels kKernels = decoder_table<DecoderPortable>();

}  // namespace

const DecoderKernels* portable_decoder() { return &kKernels; }

}  // namespace pipespec::cpu
