// What follows from the operations of lanes_*.hpp, for files that are compiled for one instruction
// set. In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {
namespace {

inline const unsigned char* bytes_of(const float* p) {
  return reinterpret_cast<const unsigned char*>(p);
}

// The sum of the lanes, in a fixed order.
template <class V>
inline float sum_of_lanes(typename V::F x) {
  float lanes[V::kLanes];
  V::store(lanes, x);
  for (int n = V::kLanes / 2; n >= 1; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

// The sums of the lanes of V::kLanes vectors, each in the order of sum_of_lanes.
template <class V>
inline typename V::F sums_of_lanes(const typename V::F (&x)[V::kLanes]) {
  typename V::I words[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) words[i] = V::bits_of(x[i]);
  V::transpose(words);
  typename V::F lanes[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) lanes[i] = V::float_of(words[i]);
#pragma GCC unroll 4
  for (int n = V::kLanes / 2; n >= 1; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) lanes[i] = V::add(lanes[i], lanes[i + n]);
  return lanes[0];
}

template <class Format>
inline void copy_bytes(unsigned char* to, const unsigned char* from, int64_t elements) {
  for (int64_t i = 0; i < elements * Format::kBytes; ++i) to[i] = from[i];
}

// The first `n` elements at p, at most kLanes, and zeros after them; reads nothing else.
template <class V, class Format>
inline typename V::F load_part(const unsigned char* p, int64_t n) {
  if (n >= V::kLanes) return Format::load(p);
  unsigned char buffer[V::kLanes * 4] = {};
  copy_bytes<Format>(buffer, p, n);
  return Format::load(buffer);
}

}  // namespace
}  // namespace pipespec::cpu
