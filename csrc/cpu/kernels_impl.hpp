// All inner kernels over the vectors of one instruction set. Included by each kernels_*.cpp, after
// its lanes, and by nothing else.
#pragma once

#include "coupled_impl.hpp"
#include "decoder_impl.hpp"
#include "kernels.hpp"
#include "recurrent_impl.hpp"
#include "span_impl.hpp"

namespace pipespec::cpu {
namespace {

// `V16`, `V32`: integer vectors for span_impl.hpp; `D`: `V` with what decoder_impl.hpp needs.
template <class V, class V16, class V32, class D>
constexpr Kernels table(const char* name) {
  return {{name, span_argmax<V16>, span_argmax<V32>},
          {coupled_select<V, Float32>, coupled_select<V, BFloat16>, coupled_select<V, Float16>,
           noise_span<V>},
          decoder_table<D>(),
          recurrent_table<D>()};
}

}  // namespace
}  // namespace pipespec::cpu
