// The exponential function over the vectors of lanes_*.hpp, for files that are compiled for one
// instruction set. In an unnamed namespace, see span_impl.hpp.
#pragma once

namespace pipespec::cpu {
namespace {

// e^x within 2 ulp, for x in -83 .. 44; beyond, of the nearer end. NaN stays NaN.
template <class V>
inline typename V::F exponential(typename V::F x) {
  using F = typename V::F;
  const F low = V::broadcast(-83.0f), high = V::broadcast(44.0f);
  x = V::max(low, x);
  x = V::where_less(high, x, high, x);
  const F d = V::multiply(x, V::broadcast(1.44269504f));
  const F part = V::fraction(d);
  // ln 2 in two parts: a product with the first one is exact.
  const F whole = V::subtract(V::broadcast(0.0f), V::subtract(d, part));
  F r = V::multiply_add(whole, V::broadcast(0.693359375f), x);
  r = V::multiply_add(whole, V::broadcast(-2.12194440e-4f), r);
  // Taylor's series: the next term is below 2^-27 for |r| <= ln(2) / 2.
  F y = V::broadcast(1.0f / 5040);
  y = V::multiply_add(y, r, V::broadcast(1.0f / 720));
  y = V::multiply_add(y, r, V::broadcast(1.0f / 120));
  y = V::multiply_add(y, r, V::broadcast(1.0f / 24));
  y = V::multiply_add(y, r, V::broadcast(1.0f / 6));
  y = V::multiply_add(y, r, V::broadcast(0.5f));
  y = V::multiply_add(y, r, V::broadcast(1.0f));
  y = V::multiply_add(y, r, V::broadcast(1.0f));
  return V::scale(y, d, part);
}

}  // namespace
}  // namespace pipespec::cpu
