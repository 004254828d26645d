// A model that needs no computation and shows every error. Its next token is a hash of the tokens
// that its cache holds, position by position: a hole, a stale entry or a shifted one changes the
// text. Plain decoding with the same model gives the text that every pipeline must reproduce.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "protocol/commit.hpp"

namespace fake {

using Tokens = std::vector<std::int32_t>;

inline std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline std::uint64_t extend(std::uint64_t hash, std::int32_t token) {
  return mix(hash * 0x9e3779b97f4a7c15u + static_cast<std::uint32_t>(token) + 1);
}

struct Random {
  std::uint64_t state;
  std::uint64_t next() { return mix(state += 0x9e3779b97f4a7c15u); }
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(next() % n); }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[below(static_cast<std::uint32_t>(of.size()))];
  }
};

// The target's choices.
struct Truth {
  std::uint64_t seed = 1;
  std::int32_t vocabulary = 40;
  Tokens eos = {-5};      // ids that end a text; at least one, so that drafts can propose it
  double eos_rate = 0.0;  // how often the hash gives one of them

  std::int32_t next(std::uint64_t hash) const {
    const std::uint64_t bits = mix(hash ^ seed);
    if (static_cast<double>(bits >> 11) * 0x1p-53 < eos_rate) {
      return eos[bits % eos.size()];
    }
    return 100 + static_cast<std::int32_t>((bits >> 5) % static_cast<std::uint32_t>(vocabulary));
  }
  static std::uint64_t hash_of(const std::int32_t* tokens, std::uint32_t n) {
    std::uint64_t hash = 0;
    for (std::uint32_t i = 0; i < n; ++i) hash = extend(hash, tokens[i]);
    return hash;
  }
};

// A stage's model: chooses the target's token with some probability.
struct Model {
  const Truth* truth;
  double accuracy = 1.0;
  std::uint64_t seed = 0;

  std::int32_t next(std::uint64_t hash) const {
    const std::int32_t right = truth->next(hash);
    Random random{hash ^ mix(seed + 17)};
    if (random.chance(accuracy)) return right;
    // Few wrong answers, so that two drafts are often wrong in the same way; one of them is EOS.
    if (right != truth->eos.front() && random.below(5) == 0) {
      return truth->eos.front();
    }
    const auto other = 100 + static_cast<std::int32_t>(random.below(3));
    return other == right ? other + 1 : other;
  }
};

// Storage for keys and values of one row. Every entry is the token it was computed from.
class Cache {
 public:
  explicit Cache(const Model& model) : model_(model) {}

  // The prompt but for its last token, as a prefill leaves it.
  void prefill(const Tokens& prompt) {
    entries_.assign(prompt.begin(), prompt.end() - 1);
    entries_.resize(entries_.size() + 8, kGarbage);
  }

  // A forward over a row of a rectangle with `columns` columns: padding lands in the storage too.
  void feed(const std::int32_t* tokens, std::uint32_t kv, std::uint32_t query_len,
            std::uint32_t columns) {
    if (entries_.size() < kv + columns) entries_.resize(kv + columns, kGarbage);
    for (std::uint32_t i = 0; i < columns; ++i)
      entries_[kv + i] = i < query_len ? tokens[i] : kGarbage;
  }

  // The result of the operation `verify`: choices while the draft tokens agree, then one more, then
  // -1.
  void select(const std::int32_t* tokens, std::uint32_t kv, std::uint32_t query_len,
              std::uint32_t num_draft_tokens, std::int32_t* selected, std::uint32_t columns) const {
    std::fill(selected, selected + columns, -1);
    if (query_len == 0) return;
    const std::uint32_t own = query_len - num_draft_tokens;
    std::uint64_t hash = Truth::hash_of(entries_.data(), kv + own);
    for (std::uint32_t j = 0;; ++j) {
      selected[j] = model_.next(hash);
      if (j == num_draft_tokens || selected[j] != tokens[own + j]) return;
      hash = extend(hash, entries_[kv + own + j]);
    }
  }

  const Tokens& entries() const { return entries_; }
  static constexpr std::int32_t kGarbage = -1000;

 private:
  Model model_;
  Tokens entries_;
};

// Plain decoding: the prompt and what the model makes of it, up to position `limit` or the first
// EOS.
inline Tokens plain(const Model& model, const Tokens& prompt, std::uint32_t limit) {
  Tokens text = prompt;
  std::uint64_t hash = Truth::hash_of(text.data(), static_cast<std::uint32_t>(text.size()));
  while (text.size() < limit) {
    text.push_back(model.next(hash));
    hash = extend(hash, text.back());
    const Tokens& eos = model.truth->eos;
    if (std::find(eos.begin(), eos.end(), text.back()) != eos.end()) break;
  }
  return text;
}

// Memory for a block, shared with child processes.
class BlockMemory {
 public:
  BlockMemory(std::uint32_t stages, std::uint32_t rows, std::uint32_t capacity)
      : size_(pipespec::Block::bytes(stages, rows, capacity)),
        base_(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    block_ = pipespec::Block::create(base_, stages, rows, capacity);
    for (std::uint32_t s = 0; s < stages; ++s) block_.control(s).alive = 1;
  }
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;
  ~BlockMemory() { munmap(base_, size_); }

  void* base() const { return base_; }
  const pipespec::Block& block() const { return block_; }

 private:
  std::size_t size_;
  void* base_;
  pipespec::Block block_;
};

inline std::uint32_t power_of_two(std::uint32_t n) {
  std::uint32_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Positions [begin, end) of a stage's sequence.
inline Tokens tokens_of(const pipespec::Block& block, std::uint32_t stage, std::uint32_t row,
                        std::uint32_t begin, std::uint32_t end) {
  const pipespec::Sequence sequence(block, stage, row);
  Tokens out;
  for (std::uint32_t p = begin; p < end; ++p) out.push_back(sequence.token(p));
  return out;
}

}  // namespace fake
