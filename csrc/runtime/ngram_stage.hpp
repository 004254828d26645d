// A stage without a model: it drafts what followed the newest tokens where they occurred before. It
// runs the same step as every stage. Where nothing matches, it selects nothing. It is the first
// stage of a chain, or the last draft: then the target verifies either its tokens or those that it
// passes on.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "../cpu/ngram.hpp"
#include "stage_port.hpp"

namespace pipespec {

class NgramStage {
 public:
  // `empty`: an index without tokens, for each row. `corpus`: of all rows; null: none.
  NgramStage(const Block& block, std::uint32_t stage, std::uint32_t width, const NgramIndex& empty,
             std::shared_ptr<const NgramCorpus> corpus)
      : block_(block),
        stage_(stage),
        port_(block, stage, width),
        indices_(port_.rows(), empty),
        indexed_(port_.rows()),
        corpus_(std::move(corpus)),
        selected_(std::size_t{port_.rows()} * width) {}

  // The tokens before the one that the first step feeds.
  void prefill(std::uint32_t row, const std::int32_t* tokens, std::size_t count) {
    indices_.at(row).write(0, tokens, count);
    indexed_[row] = static_cast<std::uint32_t>(count);
  }

  // The tokens that the target has committed, as far as the last step has seen, from `begin` on.
  std::vector<std::int32_t> text(std::uint32_t row, std::uint32_t begin) const {
    const NgramIndex& index = indices_.at(row);
    const std::size_t end = std::min<std::size_t>(indexed_[row], index.size());
    std::vector<std::int32_t> out;
    for (std::size_t i = begin; i < end; ++i) out.push_back(index.token(i));
    return out;
  }

  struct Outlook {
    std::uint32_t tokens;  // that fill() would draft
    std::uint32_t match;   // length of the first one's, see NgramIndex::Match
  };
  // Follows the target, and tells what fill(count) would draft for a row. Publishes nothing of it.
  Outlook foresee(std::uint32_t row, std::uint32_t count) {
    follow();
    NgramIndex& index = indices_.at(row);
    const std::size_t length = index.size();
    Outlook out{0, 0};
    for (; out.tokens < count; ++out.tokens) {
      const NgramIndex::Match match = index.match(corpus_.get());
      if (match.token < 0) break;
      if (out.tokens == 0) out.match = match.length;
      index.append(match.token);
    }
    index.truncate(length);
    return out;
  }

  // Publishes the tokens of the stage upstream, at most `count` per row, as its own.
  void relay(std::uint32_t count) {
    const std::uint32_t width = port_.width();
    while (count > 0 && port_.plan(count + 1, count, 0) == Action::kStep) {
      bool is_behind = false;
      for (std::uint32_t row = 0; row < port_.rows(); ++row) {
        std::int32_t& draft_tokens = port_.num_draft_tokens()[row];
        std::int32_t& query_len = port_.query_lens()[row];
        if (port_.n_select()[row] == 0) {
          is_behind |= query_len > 0;
          continue;
        }
        const std::int32_t* drafts =
            port_.tokens().data() + std::size_t{row} * width + query_len - draft_tokens;
        std::copy(drafts, drafts + draft_tokens, selected_.data() + std::size_t{row} * width);
        // The last one takes the place of a token of its own. Without any, nothing is committed.
        query_len = draft_tokens == 0 ? 0 : query_len - 1;
        draft_tokens = std::max(draft_tokens - 1, 0);
      }
      port_.commit(selected_.data(), width);
      if (!is_behind) return;
    }
  }

  // Steps until each row is `lookahead` tokens ahead or has no match.
  void fill(std::uint32_t lookahead) {
    follow();
    while (port_.plan(lookahead, 0, 0) == Action::kStep) {
      bool commits = false;
      for (std::uint32_t row = 0; row < port_.rows(); ++row) {
        std::int32_t& query_len = port_.query_lens()[row];
        if (query_len == 0) continue;
        const std::int32_t* tokens = port_.tokens().data() + std::size_t{row} * port_.width();
        indices_[row].write(port_.kv()[row], tokens, query_len);
        if (port_.n_select()[row] > 0) {
          selected_[row] = indices_[row].match(corpus_.get()).token;
          // The row commits nothing, and the next plan gives its tokens once more.
          if (selected_[row] < 0) query_len = 0;
        }
        commits |= query_len > 0;
      }
      if (!commits) return;
      port_.commit(selected_.data(), 1);
    }
  }

  void trace(TraceBuffer* buffer) { port_.trace(buffer); }

 private:
  // Rolls back and adopts as every stage does, and indexes what it has adopted or passed on.
  void follow() {
    port_.plan(0, 0, 0);
    for (std::uint32_t row = 0; row < block_.active_rows(); ++row) {
      const Sequence own(block_, stage_, row);
      const std::uint32_t known = static_cast<std::uint32_t>(indices_[row].size());
      const std::uint32_t length = own.word().length;
      const std::uint32_t begin = std::min({indexed_[row], known, length});
      // In damaged memory, too, no more tokens than a ring has.
      const std::uint32_t end = std::min(length, begin + block_.capacity());
      fresh_.clear();
      for (std::uint32_t p = begin; p < end; ++p) fresh_.push_back(own.token(p));
      indices_[row].write(begin, fresh_.data(), fresh_.size());
      indexed_[row] = Sequence(block_, block_.target(), row).word().length;
    }
  }

  Block block_;
  std::uint32_t stage_;
  StagePort port_;
  std::vector<NgramIndex> indices_;
  // Per row, tokens of its index that the target has committed.
  std::vector<std::uint32_t> indexed_;
  std::vector<std::int32_t> fresh_;
  std::shared_ptr<const NgramCorpus> corpus_;
  std::vector<std::int32_t> selected_;
};

}  // namespace pipespec
