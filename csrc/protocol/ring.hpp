// One stage's token sequence of one row, as its owner writes it and as neighbours read it.
//
// Positions grow monotonically and are masked into the ring. The ring holds a whole generation (4
// bytes per token, next to kilobytes of KV cache for the same token). So no reader can be lapped,
// and the target never waits for a reader.
//
// The orders (numbers: litmus tests in tests/native/test_memory_orders.cpp)
//   Tokens are relaxed. The owner publishes by storing the word with release, once for all tokens
//   before it. A reader loads the word with acquire, then tokens below its length (L1). A reader
//   may read while the owner rolls back and writes other tokens. Within one epoch the tokens below
//   the length do not change. The owner stores a new epoch *before* it overwrites, with a fence
//   between. The reader loads tokens *before* it looks at the epoch again (still()), with a fence
//   between. So a reader that saw a token of a new epoch also sees the new epoch (L2).
//   `committed` is relaxed: after still(), the tokens below it are the target's (L4).
//
// A reader may take tokens without still(), or tokens of two epochs. A draft token is copied once,
// fed, and compared with the stage's own choice, so a torn one is rejected like any wrong draft
// token. An adopted token lies past the committed length, and the neighbour's epoch has changed by
// then, so the next plan() compares it again. The target adopts nothing, and its sequence has one
// epoch. So a torn or stale read costs time and never a token (L5).
#pragma once

#include "lanes.hpp"
#include "state.hpp"

namespace pipespec {

// The reader's view.
class Sequence {
 public:
  PIPESPEC_HD Sequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : published_(&block.published(stage, row)),
        ring_(block.ring(stage, row)),
        mask_(block.capacity() - 1),
        scope_(block.scope()) {}

  [[nodiscard]] PIPESPEC_HD Word word() const {
    return unpack(load_acquire(&published_->word, scope_));
  }
  // The same value in all lanes.
  template <typename Lanes>
  [[nodiscard]] PIPESPEC_HD Word word(const Lanes& lanes) const {
    return unpack(lanes.once([&] { return load_acquire(&published_->word, scope_); }));
  }
  // Whether the epoch is that of `seen`: then all tokens that were read since belong to it.
  template <typename Lanes = OneLane>
  [[nodiscard]] PIPESPEC_HD bool still(Word seen, const Lanes& lanes = {}) const {
    fence_acquire(scope_);
    return seen.epoch ==
           lanes.once([&] { return unpack(load_relaxed(&published_->word, scope_)).epoch; });
  }
  [[nodiscard]] PIPESPEC_HD std::uint32_t committed() const {
    return load_relaxed(&published_->committed, scope_);
  }
  [[nodiscard]] PIPESPEC_HD std::int32_t token(std::uint32_t position) const {
    return load_relaxed(&ring_[position & mask_], scope_);
  }

 protected:
  Published* published_;
  std::int32_t* ring_;
  std::uint32_t mask_;
  Scope scope_;
};

// The owner's view: append, adopt, truncate. These publish, but for append().
class OwnSequence : public Sequence {
 public:
  PIPESPEC_HD OwnSequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : Sequence(block, stage, row),
        word_(unpack(load_relaxed(&published_->word, scope_))),
        committed_(Sequence::committed()) {}

  [[nodiscard]] PIPESPEC_HD std::uint32_t length() const { return word_.length; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t epoch() const { return word_.epoch; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t committed() const { return committed_; }

  // Writes the next token; visible to others only after publish().
  PIPESPEC_HD void append(std::int32_t token) {
    store_relaxed(&ring_[word_.length++ & mask_], token, scope_);
  }
  // Writes the next n tokens: token(0), token(1), ...
  template <typename Token, typename Lanes>
  PIPESPEC_HD void append(std::uint32_t n, const Token& token, const Lanes& lanes) {
    for (std::uint32_t i = lanes.index(); i < n; i += Lanes::kCount)
      store_relaxed(&ring_[(word_.length + i) & mask_], token(i), scope_);
    word_.length += n;
  }
  template <typename Lanes = OneLane>
  PIPESPEC_HD void publish(const Lanes& lanes = {}) {
    lanes.once([&] { store_release(&published_->word, pack(word_), scope_); });
  }
  // Takes over the tokens of `other` up to `length`, and publishes.
  template <typename Lanes = OneLane>
  PIPESPEC_HD void adopt(const Sequence& other, std::uint32_t length, const Lanes& lanes = {}) {
    const std::uint32_t begin = word_.length;
    if (begin < length)
      append(length - begin, [&](std::uint32_t i) { return other.token(begin + i); }, lanes);
    publish(lanes);
  }
  // Rolls back to `length`. Publishes the new epoch before any token is overwritten.
  template <typename Lanes = OneLane>
  PIPESPEC_HD void truncate(std::uint32_t length, const Lanes& lanes = {}) {
    word_ = {word_.epoch + 1, length};
    publish(lanes);
    fence_release(scope_);
  }
  template <typename Lanes = OneLane>
  PIPESPEC_HD void set_committed(std::uint32_t length, const Lanes& lanes = {}) {
    if (length == committed_) return;
    committed_ = length;
    lanes.once([&] { store_relaxed(&published_->committed, length, scope_); });
  }

 private:
  Word word_;
  std::uint32_t committed_;
};

// The sequence that OwnSequence would become, without a write to memory. It can adopt twice, as
// plan() does: from the target, then from a neighbour.
class ImaginedSequence : public Sequence {
 public:
  PIPESPEC_HD ImaginedSequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : Sequence(block, stage, row),
        length_(word().length),
        committed_(Sequence::committed()),
        own_end_(length_),
        first_end_(length_),
        first_(*this),
        second_(*this) {}

  [[nodiscard]] PIPESPEC_HD std::uint32_t length() const { return length_; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t committed() const { return committed_; }
  [[nodiscard]] PIPESPEC_HD std::int32_t token(std::uint32_t position) const {
    if (position < own_end_) return Sequence::token(position);
    return (position < first_end_ ? first_ : second_).token(position);
  }
  PIPESPEC_HD void truncate(std::uint32_t length, OneLane = {}) {
    length_ = length;
    own_end_ = length < own_end_ ? length : own_end_;
    first_end_ = length < first_end_ ? length : first_end_;
  }
  PIPESPEC_HD void adopt(const Sequence& other, std::uint32_t length, OneLane = {}) {
    length_ = length;
    if (adopted_) {
      second_ = other;
      return;
    }
    adopted_ = true;
    first_ = other;
    first_end_ = length;
  }
  PIPESPEC_HD void set_committed(std::uint32_t length, OneLane = {}) { committed_ = length; }

 private:
  std::uint32_t length_;
  std::uint32_t committed_;
  std::uint32_t own_end_;    // the owner's tokens end here,
  std::uint32_t first_end_;  // those of `first_` here; those of `second_` follow
  Sequence first_, second_;
  bool adopted_ = false;
};

}  // namespace pipespec
