// Prompt lookup: the n-grams of a text and where each occurred last. append() and truncate() take a
// constant time per token, so a rollback costs what the tokens cost that it removes.
//
// For each n there is a hash table from n-grams to the position where their latest occurrence ends.
// It resolves collisions by linear probing. Each position remembers its slot and what the slot held
// before. Positions are removed in the reverse order, so restoring the slot gives exactly the table
// before the append, and no removal leaves a tombstone. What the slot held before is also the
// answer to a lookup: the end of the latest earlier occurrence.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "ngram_corpus.hpp"

namespace pipespec {

class NgramIndex {
 public:
  static constexpr std::int32_t kNone = -1;
  static constexpr std::uint32_t kMaxMatch = 32;

  // Suffixes of `min_match` to `max_match` tokens are looked up.
  NgramIndex(std::uint32_t min_match, std::uint32_t max_match)
      : min_match_(min_match), max_match_(max_match) {
    if (min_match < 1 || max_match < min_match || max_match > kMaxMatch)
      throw std::invalid_argument("an n-gram index needs 1 <= min_match <= max_match <= 32");
    tables_.resize(max_match - min_match + 1);
  }

  std::size_t size() const { return tokens_.size(); }
  std::int32_t token(std::size_t position) const { return tokens_[position]; }

  void append(std::int32_t token) {
    tokens_.push_back(token);
    const std::size_t end = tokens_.size() - 1;
    std::uint64_t hash = 0;
    for (std::uint32_t n = 1; n <= max_match_; ++n) {
      const bool exists = n <= tokens_.size();
      if (exists) hash = extend(hash, tokens_[end + 1 - n]);
      if (n < min_match_) continue;
      Table& table = tables_[n - min_match_];
      if (!exists) {
        table.entries.push_back({kNone, kNone});
        continue;
      }
      if (2 * (table.used + 1) > table.latest.size()) grow(table, n);
      const std::size_t slot = find(table, n, hash, &tokens_[end]);
      const std::int32_t earlier = table.latest[slot];
      table.entries.push_back({static_cast<std::int32_t>(slot), earlier});
      table.latest[slot] = static_cast<std::int32_t>(end);
      table.used += earlier == kNone;
    }
  }

  void truncate(std::size_t length) {
    for (; tokens_.size() > length; tokens_.pop_back())
      for (Table& table : tables_) {
        const Entry last = table.entries.back();
        table.entries.pop_back();
        if (last.slot == kNone) continue;
        table.latest[last.slot] = last.earlier;
        table.used -= last.earlier == kNone;
      }
  }

  // Makes the tokens from `position` on equal to `tokens`; `position` is at most size().
  void write(std::size_t position, const std::int32_t* tokens, std::size_t count) {
    std::size_t same = 0;
    while (same < count && position + same < size() && tokens_[position + same] == tokens[same])
      ++same;
    truncate(position + same);
    for (; same < count; ++same) append(tokens[same]);
  }

  // What a text continues with.
  struct Match {
    std::int32_t token;  // kNone: no suffix matches
    // Of the suffix that occurred earlier in the text; in a corpus, kMaxMatch + 1, 2 or 3: how
    // certain the token is.
    std::uint32_t length;
  };
  // The token after the latest earlier occurrence of the longest suffix of at least `min_match`
  // tokens that has one; or what follows in `corpus`, where that is more certain.
  Match match(const NgramCorpus* corpus = nullptr) const {
    if (tokens_.empty()) return {kNone, 0};
    const std::size_t end = tokens_.size() - 1;
    Match own{kNone, 0};
    for (std::uint32_t n = max_match_; n >= min_match_; --n) {
      const std::int32_t earlier = tables_[n - min_match_].entries[end].earlier;
      if (earlier == kNone) continue;
      own = {tokens_[earlier + 1], n};
      break;
    }
    if (corpus == nullptr) return own;
    const NgramCorpus::Follower other = corpus->follower(&tokens_[end] + 1, tokens_.size());
    if (other.certainty < std::max(kLeast, certainty(own.length))) return own;
    return {other.token,
            kMaxMatch + 1u + (other.certainty >= kMedium) + (other.certainty >= kHigh)};
  }

 private:
  struct Entry {
    std::int32_t slot;     // of the n-gram that ends here; kNone: the text is shorter than n
    std::int32_t earlier;  // what the slot held before: where the n-gram ended before, or kNone
  };
  struct Table {
    std::vector<std::int32_t> latest;  // by slot: position of the newest last token, or kNone
    std::vector<Entry> entries;        // by position
    std::size_t used = 0;              // slots
  };

  // The hash of an n-gram covers its tokens from the last to the first, so that one pass over the
  // newest tokens gives those of all n.
  static std::uint64_t extend(std::uint64_t hash, std::int32_t token) {
    hash = (hash + static_cast<std::uint32_t>(token) + 1) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
  }

  // The slot of the n-gram whose last token is `*last`, or the empty slot where it belongs.
  std::size_t find(const Table& table, std::uint32_t n, std::uint64_t hash,
                   const std::int32_t* last) const {
    const std::size_t mask = table.latest.size() - 1;
    std::size_t slot = hash & mask;
    while (table.latest[slot] != kNone && !equal(&tokens_[table.latest[slot]], last, n))
      slot = (slot + 1) & mask;
    return slot;
  }
  static bool equal(const std::int32_t* a, const std::int32_t* b, std::uint32_t n) {
    return std::equal(a + 1 - n, a + 1, b + 1 - n);
  }

  // Half of the slots stay empty.
  void grow(Table& table, std::uint32_t n) {
    table.latest.assign(std::max<std::size_t>(64, 2 * table.latest.size()), kNone);
    for (std::size_t end = n - 1; end < table.entries.size(); ++end) {
      std::uint64_t hash = 0;
      for (std::uint32_t i = 0; i < n; ++i) hash = extend(hash, tokens_[end - i]);
      const std::size_t slot = find(table, n, hash, &tokens_[end]);
      table.entries[end].slot = static_cast<std::int32_t>(slot);
      table.latest[slot] = static_cast<std::int32_t>(end);
    }
  }

  // An estimate for the token after an earlier occurrence of `n` tokens in the same text. This and
  // the limits of a corpus's certainty are of answers of a 1.5B model to chat and code.
  static constexpr float certainty(std::uint32_t n) {
    return n == 0 ? 0.0f : std::min(0.95f, 0.2f + 0.12f * static_cast<float>(n));
  }
  static constexpr float kLeast = 0.2f, kMedium = 0.35f, kHigh = 0.6f;

  std::uint32_t min_match_, max_match_;
  std::vector<std::int32_t> tokens_;
  std::vector<Table> tables_;  // by n - min_match
};

}  // namespace pipespec
