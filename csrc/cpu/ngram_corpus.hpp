// What usually follows the newest tokens in a corpus: a fixed text beside those of the rows.
//
// The positions of the corpus are sorted by the n-grams that end there, read from the last token to
// the first. The occurrences of a suffix are then one range, and those of a suffix that is longer
// by one token are a range within it. It takes eight bytes per token, and a lookup narrows the
// range once per token of the suffix.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace pipespec {

class NgramCorpus {
 public:
  static constexpr std::int32_t kNone = -1;

  // Suffixes of up to `max_match` tokens are looked up.
  NgramCorpus(const std::int32_t* tokens, std::size_t count, std::uint32_t max_match)
      : tokens_(tokens, tokens + count), max_match_(max_match) {
    if (max_match < 1) throw std::invalid_argument("an n-gram corpus needs max_match >= 1");
    if (count > std::size_t{INT32_MAX})
      throw std::invalid_argument("an n-gram corpus has at most 2^31 - 1 tokens");
    // Nothing follows the last token.
    order_.resize(count == 0 ? 0 : count - 1);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [this](std::int32_t a, std::int32_t b) {
      for (std::uint32_t n = 0; n < max_match_; ++n) {
        const std::int32_t x = before(a, n), y = before(b, n);
        if (x != y) return x < y;
      }
      return a < b;
    });
  }

  struct Follower {
    std::int32_t token;  // kNone: the newest token does not occur
    float certainty;     // an estimate of the probability that it is right
  };
  // The token that followed most often where the longest suffix of a text occurs that has an
  // occurrence; of equally frequent ones, the one that followed last. `end` points behind the
  // text's `length` tokens.
  //
  // Of many occurrences kSample are read, at equal distances. Where the token followed in m of N
  // occurrences of n tokens, the certainty is m / (N + 3 / n): one occurrence says little, and that
  // of a long suffix more.
  Follower follower(const std::int32_t* end, std::size_t length) const {
    auto first = order_.begin(), last = order_.end();
    std::uint32_t n = 0;
    for (; n < max_match_ && n < length; ++n) {
      const std::int32_t token = end[-1 - static_cast<std::ptrdiff_t>(n)];
      const auto from = std::lower_bound(
          first, last, token, [&](std::int32_t p, std::int32_t t) { return before(p, n) < t; });
      const auto to = std::upper_bound(
          from, last, token, [&](std::int32_t t, std::int32_t p) { return t < before(p, n); });
      if (from == to) break;
      first = from, last = to;
    }
    if (n == 0) return {kNone, 0};

    struct Vote {
      std::int32_t token, position;
    };
    std::array<Vote, kSample> votes;
    const std::size_t occurrences = last - first, read = std::min(occurrences, kSample);
    for (std::size_t i = 0; i < read; ++i) {
      const std::int32_t p = first[static_cast<std::ptrdiff_t>(i * occurrences / read)];
      votes[i] = {tokens_[p + 1], p};
    }
    std::sort(votes.begin(), votes.begin() + read, [](const Vote& a, const Vote& b) {
      return a.token != b.token ? a.token < b.token : a.position < b.position;
    });
    std::size_t most = 0;
    Vote best{kNone, -1};
    for (std::size_t i = 0, same = 1; i < read; ++i, ++same) {
      if (i + 1 < read && votes[i + 1].token == votes[i].token) continue;
      if (same > most || (same == most && votes[i].position > best.position))
        most = same, best = votes[i];
      same = 0;
    }
    const float share = static_cast<float>(most) / static_cast<float>(read);
    const float all = static_cast<float>(occurrences);
    return {best.token, share * all / (all + 3.0f / static_cast<float>(n))};
  }

 private:
  static constexpr std::size_t kSample = 64;

  // The token `n` places before `position`; kNone before the beginning.
  std::int32_t before(std::int32_t position, std::uint32_t n) const {
    const std::int64_t place = std::int64_t{position} - n;
    return place < 0 ? kNone : tokens_[place];
  }

  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> order_;
  std::uint32_t max_match_;
};

}  // namespace pipespec
