#include "confidence.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "../protocol/confidence.hpp"
#include "kernels.hpp"

namespace pipespec::cpu {
namespace {

constexpr float kLog2E = 1.44269504f;

}  // namespace

void confidence(const Logits& logits, const float* inv_temperature, const int32_t* query_lens,
                const int32_t* num_draft_tokens, const int32_t* selected, uint8_t* out) {
  check(logits, 1);
  check_counts(logits, query_lens, num_draft_tokens);
  const int64_t bytes = item_bytes(logits.dtype);
  const RejectionKernels& kernels = cpu::kernels().rejection;
  const Weigh weigh = (logits.dtype == DType::kFloat32    ? kernels.float32
                       : logits.dtype == DType::kBFloat16 ? kernels.bfloat16
                                                          : kernels.float16)
                          .weigh;
  std::fill_n(out, logits.batch * logits.width, uint8_t{0});
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] == 0) continue;
    const float scale = inv_temperature == nullptr ? 1.0f : inv_temperature[r];
    check_scale(scale, r, "inv_temperature");
    const int64_t first = query_lens[r] - 1 - num_draft_tokens[r];
    for (int64_t j = 0; j <= num_draft_tokens[r]; ++j) {
      const int64_t at = r * logits.width + j;
      if (selected[at] < 0) break;
      if (selected[at] >= logits.vocab)
        throw std::invalid_argument("row " + std::to_string(r) +
                                    ": a selected id lies outside of the vocabulary");
      const void* row = static_cast<const unsigned char*>(logits.data) +
                        (r * logits.batch_stride + (first + j) * logits.width_stride) * bytes;
      const float factor = scale * kLog2E;
      const Weight all =
          weigh(row, 0, logits.vocab, factor, -std::numeric_limits<float>::infinity());
      const double part = std::exp2(double(logit_at(row, logits.dtype, selected[at])) * factor -
                                    double(all.reference));
      out[at] = confidence_of(part, std::max(0.0, all.sum - part));
    }
  }
}

}  // namespace pipespec::cpu
