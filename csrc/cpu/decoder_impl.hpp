// The algorithms behind decoder_kernels.hpp, written once over a vector type. Included by each
// decoder_*.cpp and by nothing else; in an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

#include "attend_impl.hpp"
#include "decoder_kernels.hpp"
#include "exponential.hpp"
#include "lanes.hpp"
#include "rows_impl.hpp"

namespace pipespec::cpu {
namespace {

// 1 / sqrt(mean(x^2) + eps)
template <class V>
float inverse_rms(const float* x, int64_t n, float eps) {
  constexpr int64_t kLanes = V::kLanes;
  using F = typename V::F;
  F sums[4] = {V::broadcast(0.0f), V::broadcast(0.0f), V::broadcast(0.0f), V::broadcast(0.0f)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F y = Float32::load(bytes_of(x + i + j * kLanes));
      sums[j] = V::multiply_add(y, y, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const F y = n - i < kLanes ? load_part<V, Float32>(bytes_of(x + i), n - i)
                               : Float32::load(bytes_of(x + i));
    sums[0] = V::multiply_add(y, y, sums[0]);
  }
  const float sum = sum_of_lanes<V>(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(sum / float(n) + eps);
}

template <class V>
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float factor = inverse_rms<V>(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// x / (1 + e^-z)
template <class V>
inline typename V::F times_sigmoid(typename V::F x, typename V::F z) {
  const auto e = exponential<V>(V::subtract(V::broadcast(0.0f), z));
  return V::divide(x, V::add(V::broadcast(1.0f), e));
}

template <class V>
void activate(Activation kind, const float* products, int64_t panel_pairs, float* out) {
  using F = typename V::F;
  for (int64_t p = 0; p < panel_pairs; ++p, products += 2 * kPanelOutputs, out += kPanelOutputs) {
    const float* const gate = products;
    const float* const up = products + kPanelOutputs;
    if (kind == Activation::kGelu) {
      for (int64_t i = 0; i < kPanelOutputs; ++i)
        out[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.707106781f)) * up[i];
      continue;
    }
    for (int64_t i = 0; i < kPanelOutputs; i += V::kLanes) {
      const F g = Float32::load(bytes_of(gate + i));
      F z = g;
      if (kind == Activation::kGeluTanh) {
        // (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
        const F cube = V::multiply(V::multiply(g, g), g);
        z = V::multiply(V::multiply_add(cube, V::broadcast(0.044715f), g),
                        V::broadcast(1.59576912f));
      }
      V::store(out + i, V::multiply(times_sigmoid<V>(g, z), Float32::load(bytes_of(up + i))));
    }
  }
}

template <class V>
constexpr DecoderKernels decoder_table() {
  return {product<V, typename V::Int8>,
          product<V, BFloat16>,
          product<V, Float32>,
          rms_norm<V>,
          activate<V>,
          attend_kernels<V, SingleSteps<V>>(),
          attend_kernels<V, HalfSteps<V>>()};
}

}  // namespace
}  // namespace pipespec::cpu
