// Stage 0 of a chain without a model: it drafts what followed the newest tokens where they occurred
// before. It runs the same step as every stage. Where nothing matches, it selects nothing.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../cpu/ngram.hpp"
#include "stage_port.hpp"

namespace pipespec {

class NgramStage {
 public:
  // `empty`: an index without tokens, for each row. `corpus`: has the same numbers, and is read
  // only; null: none.
  NgramStage(const Block& block, std::uint32_t width, const NgramIndex& empty,
             std::shared_ptr<const NgramIndex> corpus)
      : port_(block, 0, width),
        indices_(port_.rows(), empty),
        corpus_(std::move(corpus)),
        selected_(port_.rows()),
        confidence_(port_.rows()) {}

  // The tokens before the one that the first step feeds.
  void prefill(std::uint32_t row, const std::int32_t* tokens, std::size_t count) {
    indices_.at(row).write(0, tokens, count);
  }

  // Steps until each row is `lookahead` tokens ahead or has no match.
  void fill(std::uint32_t lookahead) {
    while (port_.plan(lookahead, 0, 0) == Action::kStep) {
      bool commits = false;
      for (std::uint32_t row = 0; row < port_.rows(); ++row) {
        std::int32_t& query_len = port_.query_lens()[row];
        if (query_len == 0) continue;
        const std::int32_t* tokens = port_.tokens().data() + std::size_t{row} * port_.width();
        indices_[row].write(port_.kv()[row], tokens, query_len);
        if (port_.n_select()[row] > 0) {
          const NgramIndex::Match match = indices_[row].match(corpus_.get());
          selected_[row] = match.token;
          confidence_[row] = confidence_of_match(match.length);
          // The row commits nothing, and the next plan gives its tokens once more.
          if (selected_[row] < 0) query_len = 0;
        }
        commits |= query_len > 0;
      }
      if (!commits) return;
      port_.commit(selected_.data(), 1, confidence_.data());
    }
  }

  void trace(TraceBuffer* buffer) { port_.trace(buffer); }
  void use_confidence(bool uses) { port_.use_confidence(uses); }

  // The longer the match, the surer: one bin of the calibration per length above that of even odds;
  // the longest matches share the last bin.
  static std::uint8_t confidence_of_match(std::uint32_t length) {
    constexpr std::uint32_t kBin = (kMostConfidence + 1) / kConfidenceBins;
    return static_cast<std::uint8_t>(
        std::min(static_cast<std::uint32_t>(kConfidenceCentre) + kBin * length, kMostConfidence));
  }

 private:
  StagePort port_;
  std::vector<NgramIndex> indices_;
  std::shared_ptr<const NgramIndex> corpus_;
  std::vector<std::int32_t> selected_;
  std::vector<std::uint8_t> confidence_;
};

}  // namespace pipespec
