// The algorithms behind decoder_kernels.hpp, written once over a vector type. Included by
// kernels_impl.hpp and by nothing else; in an unnamed namespace, see span_impl.hpp.
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
    const F y = load_part<V, Float32>(bytes_of(x + i), n - i);
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

template <class V>
void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps,
                float* out) {
  using F = typename V::F;
  F sum = V::broadcast(0.0f);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) sum = V::add(sum, Float32::load(bytes_of(x + i)));
  if (i < n) sum = V::add(sum, load_part<V, Float32>(bytes_of(x + i), n - i));
  const float mean = sum_of_lanes<V>(sum) / float(n);
  for (i = 0; i < n; ++i) out[i] = x[i] - mean;
  const float factor = inverse_rms<V>(out, n, eps);
  for (i = 0; i < n; ++i) out[i] = out[i] * factor * weight[i];
  for (i = 0; bias != nullptr && i < n; ++i) out[i] += bias[i];
}

template <class V>
void cap(float* x, int64_t n, float limit) {
  for (int64_t i = 0; i < n; i += V::kLanes)
    V::store(x + i, capped<V>(Float32::load(bytes_of(x + i)), limit));
}

// x / (1 + e^-z)
template <class V>
inline typename V::F times_sigmoid(typename V::F x, typename V::F z) {
  const auto e = exponential<V>(V::subtract(V::broadcast(0.0f), z));
  return V::divide(x, V::add(V::broadcast(1.0f), e));
}

template <class V>
void activate(Activation kind, const float* products, bool is_gated, int64_t panels, float* out) {
  using F = typename V::F;
  const int64_t step = (is_gated ? 2 : 1) * kPanelOutputs;
  float ones[kPanelOutputs];
  for (float& one : ones) one = 1.0f;
  for (int64_t p = 0; p < panels; ++p, products += step, out += kPanelOutputs) {
    const float* const gate = products;
    const float* const up = is_gated ? products + kPanelOutputs : ones;
    if (kind == Activation::kGelu) {
      for (int64_t i = 0; i < kPanelOutputs; ++i)
        out[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.707106781f)) * up[i];
      continue;
    }
    for (int64_t i = 0; i < kPanelOutputs; i += V::kLanes) {
      const F g = Float32::load(bytes_of(gate + i));
      if (kind == Activation::kRelu2) {
        const F positive = V::max(g, V::broadcast(0.0f));
        V::store(out + i,
                 V::multiply(V::multiply(positive, positive), Float32::load(bytes_of(up + i))));
        continue;
      }
      F z = g;
      if (kind == Activation::kQuickGelu) {
        z = V::multiply(g, V::broadcast(1.702f));
      } else if (kind == Activation::kGeluTanh) {
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
          layer_norm<V>,
          activate<V>,
          cap<V>,
          attend_kernels<V, SingleSteps<V>>(),
          attend_kernels<V, HalfSteps<V>>()};
}

}  // namespace
}  // namespace pipespec::cpu
