// The inner kernels of the decoder's forward (decoder.hpp), one table per instruction set. Seen by
// files compiled for wider instructions, hence nothing with inline functions here (see
// kernels.hpp).
//
// Each output number is computed by one sequence of operations, which depends on nothing but its
// own inputs: neither on the number of rows or panels of a call nor on the place of a row among
// them. Forwards of any width therefore give the same bits.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// Outputs of a panel: what products compute at a time.
inline constexpr int64_t kPanelOutputs = 16;

// Rows of a matrix where they lie, one after the other: outputs 0 .. count - 1 of a panel. The
// others are zero.
struct RowPanel {
  const unsigned char* rows;
  int64_t count;  // 1 .. kPanelOutputs
};

// Products with blocks ask for their panels this many bytes before they multiply by them. The
// hardware alone does not keep enough lines in flight: it stops at each page of 4096 bytes.
inline constexpr int64_t kPrefetchBytes = 4096;

enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu2 = 3, kQuickGelu = 4 };

inline constexpr int64_t kMaxLanes = 16;
// Positions whose softmax is computed by itself. The parts are merged in order, so that different
// threads may compute them, with the same bits.
inline constexpr int64_t kAttendSpan = 256;

// The queries of one row that share one head of keys and values.
struct AttendTask {
  const float* queries;  // query g of column j at queries + j * query_stride + g * head_dim
  int64_t query_stride;
  const void* keys;  // position t at keys + t * key_stride elements
  const void* values;
  int64_t key_stride, value_stride;
  int64_t positions;  // up to the own one of column 0; column j has j more
  int64_t window;     // of these, the last ones that a column sees; 0: all
  int64_t columns, group, head_dim;
  float scale;
  float softcap;  // scores are softcap * tanh(scaled score / softcap); 0: not capped
  float* out;     // like queries
  int64_t out_stride;
  float* scratch;   // AttendKernels::scratch_floats
  float* partials;  // [columns * group, spans] of AttendKernels::partial_floats each
  int64_t spans;    // up to the last position of the last column
  // Of each of the `group` heads: a score that takes part in the softmax and has no value; null:
  // there are none.
  const float* sinks = nullptr;
};

// out[c, 16 p + i] = sum over k of x[c, k] * (weight k of output i in panel p). `after`: a panel
// that is probably read next.
using RowProduct = void (*)(const RowPanel* panels, int64_t panel_count, const RowPanel& after,
                            int64_t inputs, const float* x, int64_t x_stride, int64_t columns,
                            float* out, int64_t out_stride);

struct AttendKernels {
  void (*attend)(const AttendTask& task);  // without `partials`
  // The same in parts: spans begin .. end - 1 into the task's partials, and all of them to `out`.
  void (*attend_spans)(const AttendTask& task, int64_t begin, int64_t end);
  void (*merge_spans)(const AttendTask& task);
  int64_t (*scratch_floats)(int64_t head_dim);
  int64_t (*partial_floats)(int64_t head_dim);
};

struct DecoderKernels {
  // Of weights in int8, bfloat16 and float32. Weights of equal values give equal bits.
  RowProduct product8, product16, product32;
  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; out may be x, bias may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t n, float eps,
                     float* out);
  // out[i] = activation(gate i) * up i, where `products` alternate between 16 gates and 16 ups, or
  // activation(up i) where there are only ups. Writes `panels` panels.
  void (*activate)(Activation kind, const float* products, bool is_gated, int64_t panels,
                   float* out);
  // x = limit * tanh(x / limit), of n numbers: a multiple of kPanelOutputs.
  void (*cap)(float* x, int64_t n, float limit);
  // Attention over float32 and bfloat16 keys and values. Sums are float32; where products of pairs
  // of bfloat16 are an instruction, queries and weights are rounded to it for the latter.
  AttendKernels attend32, attend16;
};

}  // namespace pipespec::cpu
