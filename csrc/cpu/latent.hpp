// Multi-head latent attention (DeepSeek-V2, section 2.1): all heads share a latent of keys and
// values, and a part that is rotated. The matrices that make keys and values of latents are applied
// to queries and to what the attention gives, so that a cache holds latents alone.
#pragma once

#include <cstdint>
#include <vector>

#include "product.hpp"

namespace pipespec::cpu {

struct LatentLayer {
  // Outputs of `in`: the latents of the queries, or the queries; then those of keys and values, and
  // the part of the keys that is rotated. Each in whole panels.
  Matrix in, queries;
  std::vector<Matrix> keys, values;  // of each head, [rank, plain] and [value_dim, rank]
  std::vector<float> query_norm, norm;
  int64_t rank = 0, plain = 0, value_dim = 0;  // plain: of a head that is not rotated
  int64_t query_rank = 0;                      // 0: queries have no latents
  float eps = 0.0f;

  bool is_used() const { return rank > 0; }
  int64_t outputs() const { return int64_t(values.size()) * value_dim; }
};

}  // namespace pipespec::cpu
