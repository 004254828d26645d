// The algorithms behind recurrent_kernels.hpp, written once over a vector type. In an unnamed
// namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

#include "decoder_impl.hpp"
#include "recurrent_kernels.hpp"

namespace pipespec::cpu {
namespace {

// kVectors vectors of values, from value `at` on. Each is a recurrence of its own, so all columns
// run over a part of the state that stays in the first-level cache.
template <class V, int kVectors>
void delta_strip(const DeltaTask& task, int64_t at) {
  using F = typename V::F;
  for (int64_t j = 0; j < task.columns; ++j) {
    const float *const key = task.keys + j * task.stride, *query = task.queries + j * task.stride;
    const float* const from = task.states[j] + at;
    float* const to = task.states[j + 1] + at;
    const F decay = V::broadcast(task.decay[j]), beta = V::broadcast(task.beta[j]);
    F sums[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] = V::broadcast(0.0f);
    for (int64_t k = 0; k < task.key_dim; ++k) {
      const F x = V::broadcast(key[k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[v] = V::multiply_add(
            Float32::load(bytes_of(from + k * task.value_dim + v * V::kLanes)), x, sums[v]);
    }
    F deltas[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const F value = Float32::load(bytes_of(task.values + j * task.stride + at + v * V::kLanes));
      deltas[v] = V::multiply(V::subtract(value, V::multiply(decay, sums[v])), beta);
      sums[v] = V::broadcast(0.0f);
    }
    for (int64_t k = 0; k < task.key_dim; ++k) {
      const F x = V::broadcast(key[k]), y = V::broadcast(query[k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = k * task.value_dim + v * V::kLanes;
        const F state =
            V::multiply_add(x, deltas[v], V::multiply(decay, Float32::load(bytes_of(from + i))));
        V::store(to + i, state);
        sums[v] = V::multiply_add(state, y, sums[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      V::store(task.out + j * task.out_stride + at + v * V::kLanes, sums[v]);
  }
}

// Value `at` alone, where no whole vector is left.
inline void delta_value(const DeltaTask& task, int64_t at) {
  for (int64_t j = 0; j < task.columns; ++j) {
    const float *const key = task.keys + j * task.stride, *query = task.queries + j * task.stride;
    const float* const from = task.states[j] + at;
    float* const to = task.states[j + 1] + at;
    float sum = 0.0f, out = 0.0f;
    for (int64_t k = 0; k < task.key_dim; ++k) sum += from[k * task.value_dim] * key[k];
    const float value = task.values[j * task.stride + at];
    const float delta = (value - task.decay[j] * sum) * task.beta[j];
    for (int64_t k = 0; k < task.key_dim; ++k) {
      const float state = task.decay[j] * from[k * task.value_dim] + key[k] * delta;
      to[k * task.value_dim] = state;
      out += state * query[k];
    }
    task.out[j * task.out_stride + at] = out;
  }
}

template <class V>
void delta_rule(const DeltaTask& task) {
  int64_t at = 0;
  for (; at + 4 * V::kLanes <= task.value_dim; at += 4 * V::kLanes) delta_strip<V, 4>(task, at);
  for (; at + V::kLanes <= task.value_dim; at += V::kLanes) delta_strip<V, 1>(task, at);
  for (; at < task.value_dim; ++at) delta_value(task, at);
}

// work(load, store, i) for all vectors of n numbers; the last one may have fewer.
template <class V, class Work>
inline void for_vectors(int64_t n, const Work& work) {
  using F = typename V::F;
  int64_t i = 0;
  const auto whole = [](const float* p) { return Float32::load(bytes_of(p)); };
  for (; i + V::kLanes <= n; i += V::kLanes) work(i, whole, [](float* p, F x) { V::store(p, x); });
  if (i == n) return;
  const int64_t rest = n - i;
  work(
      i, [rest](const float* p) { return load_part<V, Float32>(bytes_of(p), rest); },
      [rest](float* p, F x) {
        float lanes[V::kLanes];
        V::store(lanes, x);
        for (int64_t k = 0; k < rest; ++k) p[k] = lanes[k];
      });
}

template <class V>
void convolve(const float* inputs, int64_t input_stride, const float* weights,
              int64_t weight_stride, int64_t taps, const float* bias, int64_t n, bool activates,
              float* out) {
  for_vectors<V>(n, [&](int64_t i, auto load, auto store) {
    auto sum = V::broadcast(0.0f);
    for (int64_t t = 0; t < taps; ++t)
      sum = V::multiply_add(load(weights + t * weight_stride + i),
                            load(inputs + t * input_stride + i), sum);
    if (bias != nullptr) sum = V::add(sum, load(bias + i));
    store(out + i, activates ? times_sigmoid<V>(sum, sum) : sum);
  });
}

template <class V>
void gate(const float* gates, int64_t n, bool is_silu, float* x) {
  for_vectors<V>(n, [&](int64_t i, auto load, auto store) {
    const auto g = load(gates + i);
    const auto factor = times_sigmoid<V>(is_silu ? g : V::broadcast(1.0f), g);
    store(x + i, V::multiply(factor, load(x + i)));
  });
}

template <class V>
constexpr RecurrentKernels recurrent_table() {
  return {delta_rule<V>, convolve<V>, gate<V>};
}

}  // namespace
}  // namespace pipespec::cpu
