// One stage's token sequence of one row, as its owner writes it and as neighbours read it.
//
// Positions are monotone and masked into the ring. The ring is sized so that one generation fits (4
// bytes per token beside kilobytes of KV cache for the same token): no reader can be lapped, so the
// target never has to wait for one.
//
// A reader may look while the owner takes tokens back and writes others. Within one epoch tokens
// below the length do not change; the owner announces a new epoch *before* it overwrites. Token
// stores release and token loads acquire, so a reader that saw a token of the new epoch also sees
// the new epoch when it loads the word again: it compares the epoch before and after, and believes
// only what it read within one. (On x86 and arm64 these accesses cost what plain ones do.)
#pragma once

#include "state.hpp"

namespace pipespec {

// What anyone may do: read.
class Sequence {
 public:
  PIPESPEC_HD Sequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : published_(&block.published(stage, row)),
        ring_(block.ring(stage, row)),
        mask_(block.capacity() - 1) {}

  [[nodiscard]] PIPESPEC_HD Word word() const { return unpack(load_acquire(&published_->word)); }
  [[nodiscard]] PIPESPEC_HD std::uint32_t settled() const {
    return load_acquire(&published_->settled);
  }
  [[nodiscard]] PIPESPEC_HD std::int32_t token(std::uint32_t position) const {
    return load_acquire(&ring_[position & mask_]);
  }

 protected:
  Published* published_;
  std::int32_t* ring_;
  std::uint32_t mask_;
};

// What only the owner may do: append, take back, settle. Each call publishes.
class OwnSequence : public Sequence {
 public:
  PIPESPEC_HD OwnSequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : Sequence(block, stage, row), word_(unpack(load_relaxed(&published_->word))) {}

  [[nodiscard]] PIPESPEC_HD std::uint32_t length() const { return word_.length; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t epoch() const { return word_.epoch; }

  // Writes the next token; visible to others only after publish().
  PIPESPEC_HD void append(std::int32_t token) {
    store_release(&ring_[word_.length++ & mask_], token);
  }
  PIPESPEC_HD void publish() { store_release(&published_->word, pack(word_)); }
  // Another's tokens up to `length`.
  PIPESPEC_HD void adopt(const Sequence& other, std::uint32_t length) {
    while (word_.length < length) append(other.token(word_.length));
    publish();
  }
  // Announced at once: see above.
  PIPESPEC_HD void truncate(std::uint32_t length) {
    word_ = {word_.epoch + 1, length};
    publish();
  }
  PIPESPEC_HD void settle(std::uint32_t length) { store_release(&published_->settled, length); }

 private:
  Word word_;
};

// What its owner's sequence would become: takes back and adopts like OwnSequence, and writes
// nothing. It can adopt twice, which is what plan() does: from the target, then from a neighbour.
class ImaginedSequence : public Sequence {
 public:
  PIPESPEC_HD ImaginedSequence(const Block& block, std::uint32_t stage, std::uint32_t row)
      : Sequence(block, stage, row),
        length_(word().length),
        settled_(Sequence::settled()),
        own_end_(length_),
        first_end_(length_),
        first_(*this),
        second_(*this) {}

  [[nodiscard]] PIPESPEC_HD std::uint32_t length() const { return length_; }
  [[nodiscard]] PIPESPEC_HD std::uint32_t settled() const { return settled_; }
  [[nodiscard]] PIPESPEC_HD std::int32_t token(std::uint32_t position) const {
    if (position < own_end_) return Sequence::token(position);
    return (position < first_end_ ? first_ : second_).token(position);
  }
  PIPESPEC_HD void truncate(std::uint32_t length) {
    length_ = length;
    own_end_ = length < own_end_ ? length : own_end_;
    first_end_ = length < first_end_ ? length : first_end_;
  }
  PIPESPEC_HD void adopt(const Sequence& other, std::uint32_t length) {
    length_ = length;
    if (adopted_) {
      second_ = other;
      return;
    }
    adopted_ = true;
    first_ = other;
    first_end_ = length;
  }
  PIPESPEC_HD void settle(std::uint32_t length) { settled_ = length; }

 private:
  std::uint32_t length_;
  std::uint32_t settled_;
  std::uint32_t own_end_;    // its own tokens up to here,
  std::uint32_t first_end_;  // those of `first_` up to here, then those of `second_`
  Sequence first_, second_;
  bool adopted_ = false;
};

}  // namespace pipespec
