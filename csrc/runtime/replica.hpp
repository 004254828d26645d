// How stages of ranks without common memory share a block: each rank has a block of its own. An
// Outbox writes into messages what stages of this rank have published since the message before; an
// Inbox applies the messages of one other rank to this rank's block, as the only writer of that
// rank's stages there. So plan() and commit() run unchanged: a reader of a replica has the
// guarantees of the original (ring.hpp), only later.
//
// A message holds the newest state, not a history: what happened between two messages is sent once.
// Messages arrive in order and complete. The first one begins at the prompt.
//
//   records of 32-bit words, each beginning with its kind
//   kSequence   stage  row  epoch  length  committed  begin  token[length - begin]
//   kCounters   stage  row  n  value[n]
//   kLookahead  stage  tokens             from the target's rank alone
//   kLimit      row    position           from the target's rank alone
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "../protocol/commit.hpp"
#include "park.hpp"

namespace pipespec {

inline constexpr std::int32_t kSequence = 1, kCounters = 2, kLookahead = 3, kLimit = 4;
inline constexpr std::uint32_t kSequenceWords = 7;   // of a record without its tokens
inline constexpr std::uint32_t kSingleCounters = 8;  // of Counters, before its histogram

// One writer, one message at a time. The stages run meanwhile.
class Outbox {
 public:
  // `stages`: of this rank. `tokens`: whether the receiver reads their sequences. `counters`:
  // whether it reads their counters. `controls`: whether lookaheads and limits are sent, too.
  Outbox(const Block& block, std::vector<std::uint32_t> stages, bool tokens, bool counters,
         bool controls)
      : block_(block),
        stages_(std::move(stages)),
        tokens_(tokens),
        counters_(counters),
        controls_(controls),
        rows_(block.active_rows()),
        sent_(stages_.size() * rows_),
        lookahead_(block.stages(), kUnknown),
        limits_(rows_, kUnknown) {
    // The receiver has nothing but the rows' prompts.
    for (std::size_t i = 0; i < sent_.size(); ++i) {
      const std::uint32_t start = load_relaxed(&block_.span(i % rows_).start);
      sent_[i].committed = start;
      sent_[i].word = {0, start};
    }
  }

  // Writes what is new into `out`, which has room for `room` words. Returns the words written; 0:
  // nothing is new. What does not fit is written by the next call.
  std::uint32_t fill(std::int32_t* out, std::uint32_t room) {
    out_ = out;
    end_ = out + room;
    if (controls_) write_controls();
    // Not always from the first row: a batch may be larger than a message.
    const std::size_t first = next_;
    for (std::size_t i = 0; i < sent_.size(); ++i) {
      const std::size_t at = (first + i) % sent_.size();
      if (!write_row(at)) {
        next_ = at;
        break;
      }
    }
    return static_cast<std::uint32_t>(out_ - out);
  }

 private:
  static constexpr std::uint32_t kUnknown = 0xffff'ffff;
  struct Sent {
    Word word{};
    std::uint32_t committed = 0;
    std::uint64_t steps = 0, adopted = 0;  // of the counters: they change with every step or plan
  };

  std::size_t room() const { return static_cast<std::size_t>(end_ - out_); }
  void put(std::uint64_t value) {
    *out_++ = static_cast<std::int32_t>(value < kUnknown ? value : kUnknown);
  }
  bool record(std::int32_t kind, std::uint32_t at, std::uint32_t value) {
    if (room() < 3) return false;
    put(static_cast<std::uint32_t>(kind)), put(at), put(value);
    return true;
  }

  void write_controls() {
    for (std::uint32_t s = 0; s < block_.target(); ++s) {
      const std::uint32_t now = load_acquire(&block_.control(s).lookahead);
      if (now != lookahead_[s] && record(kLookahead, s, now)) lookahead_[s] = now;
    }
    for (std::uint32_t row = 0; row < rows_; ++row) {
      const std::uint32_t now = load_acquire(&block_.span(row).limit);
      if (now != limits_[row] && record(kLimit, row, now)) limits_[row] = now;
    }
  }

  // Returns false if the message is full.
  bool write_row(std::size_t at) {
    const std::uint32_t stage = stages_[at / rows_];
    const auto row = static_cast<std::uint32_t>(at % rows_);
    if (tokens_ && !write_sequence(stage, row, sent_[at])) return false;
    return !counters_ || write_counters(stage, row, sent_[at]);
  }

  bool write_sequence(std::uint32_t stage, std::uint32_t row, Sent& sent) {
    const Sequence own(block_, stage, row);
    for (;;) {
      const Word now = own.word();
      const std::uint32_t committed = own.committed();
      const bool same = now.epoch == sent.word.epoch;
      if (same && now.length == sent.word.length && committed == sent.committed) return true;
      // Within one epoch tokens are only appended. Committed tokens are the same in all epochs.
      const std::uint32_t begin = same ? sent.word.length : detail::min(sent.committed, now.length);
      if (room() < kSequenceWords + (begin < now.length ? 1 : 0)) return false;
      const std::uint32_t length =
          detail::min(now.length, begin + static_cast<std::uint32_t>(room()) - kSequenceWords);
      std::int32_t* tokens = out_ + kSequenceWords;
      for (std::uint32_t p = begin; p < length; ++p) tokens[p - begin] = own.token(p);
      // The stage rolled back meanwhile: begin again with its new epoch.
      if (!own.still(now)) continue;
      sent.word = {now.epoch, length};
      sent.committed = detail::min(committed, length);
      put(static_cast<std::uint32_t>(kSequence)), put(stage), put(row), put(now.epoch);
      put(length), put(sent.committed), put(begin);
      out_ += length - begin;
      return length == now.length;
    }
  }

  bool write_counters(std::uint32_t stage, std::uint32_t row, Sent& sent) {
    const Counters& c = block_.priv(stage, row).counters;
    const std::uint64_t steps = load_relaxed(&c.steps), adopted = load_relaxed(&c.adopted);
    if (steps == sent.steps && adopted == sent.adopted) return true;
    std::uint32_t bins = kHistogram;
    while (bins > 0 && load_relaxed(&c.histogram[bins - 1]) == 0) --bins;
    const std::uint32_t values = kSingleCounters + bins;
    if (room() < 4 + values) return false;
    put(static_cast<std::uint32_t>(kCounters)), put(stage), put(row), put(values);
    for (const std::uint64_t* value : {&c.steps, &c.fed, &c.drafted, &c.accepted, &c.produced,
                                       &c.adopted, &c.truncated, &c.rollbacks})
      put(load_relaxed(value));
    for (std::uint32_t bin = 0; bin < bins; ++bin) put(load_relaxed(&c.histogram[bin]));
    sent.steps = steps;
    sent.adopted = adopted;
    return true;
  }

  Block block_;
  std::vector<std::uint32_t> stages_;
  bool tokens_, counters_, controls_;
  std::uint32_t rows_;
  std::vector<Sent> sent_;  // [stages, rows]: what the receiver has
  std::vector<std::uint32_t> lookahead_, limits_;
  std::size_t next_ = 0;
  std::int32_t *out_ = nullptr, *end_ = nullptr;  // of the message that is written
};

class Inbox {
 public:
  // `stages`: of the sender. `controls`: whether it is the target's rank.
  Inbox(const Block& block, const std::vector<std::uint32_t>& stages, bool controls)
      : block_(block), controls_(controls) {
    for (const std::uint32_t stage : stages) is_senders_[stage] = true;
  }

  // Applies a message of `count` words, and wakes the stages that wait for it. Returns false for
  // one that no Outbox of this chain writes; its valid records are applied.
  bool apply(const std::int32_t* words, std::uint32_t count) {
    const std::int32_t* const end = words + count;
    std::uint32_t rung = 0;
    bool valid = true;
    while (valid && words != end) {
      const auto left = static_cast<std::uint32_t>(end - words);
      const std::uint32_t used = left < 3 ? 0 : apply_record(words, left, rung);
      valid = used > 0;
      words += used;
    }
    for (std::uint32_t stage = 0; stage < block_.stages(); ++stage)
      if (rung >> stage & 1) Bells(block_, stage).ring();
    return valid;
  }

 private:
  static std::uint32_t at(const std::int32_t* words, std::uint32_t i) {
    return static_cast<std::uint32_t>(words[i]);
  }

  // Returns the words of the record; 0 if it is not valid.
  std::uint32_t apply_record(const std::int32_t* words, std::uint32_t left, std::uint32_t& rung) {
    const std::int32_t kind = words[0];
    const std::uint32_t where = at(words, 1);
    if (kind == kLimit) return apply_limit(where, at(words, 2), rung);
    if (where >= block_.stages()) return 0;
    if (kind == kLookahead) {
      if (!controls_ || where >= block_.target()) return 0;
      set_lookahead(where, at(words, 2));
      return 3;
    }
    if (!is_senders_[where]) return 0;
    const std::uint32_t row = at(words, 2);
    if (row >= block_.active_rows()) return 0;
    if (kind == kSequence) return apply_sequence(words, left, where, row, rung);
    if (kind == kCounters) return apply_counters(words, left, where, row);
    return 0;
  }

  std::uint32_t apply_limit(std::uint32_t row, std::uint32_t limit, std::uint32_t& rung) {
    if (!controls_ || row >= block_.active_rows()) return 0;
    RowSpan& span = block_.span(row);
    // Limits are only lowered: the ring has no room for more.
    if (limit < load_relaxed(&span.start) || limit > load_relaxed(&span.limit)) return 0;
    store_release(&span.limit, limit);
    rung |= 1u << block_.target();
    return 3;
  }

  // As set_lookahead() of the caller: this rank's copy of the caller's part has one writer, too.
  void set_lookahead(std::uint32_t stage, std::uint32_t lookahead) {
    std::uint32_t* word = &block_.control(stage).lookahead;
    const std::uint32_t before = load_relaxed(word);
    if (before == lookahead) return;
    store_release(word, lookahead);
    if (before == 0) futex_wake(word);
    Bells(block_, Bells::kCaller).ring();
  }

  std::uint32_t apply_sequence(const std::int32_t* words, std::uint32_t left, std::uint32_t stage,
                               std::uint32_t row, std::uint32_t& rung) {
    if (left < kSequenceWords) return 0;
    const std::uint32_t epoch = at(words, 3), length = at(words, 4), committed = at(words, 5),
                        begin = at(words, 6);
    const std::uint32_t start = load_relaxed(&block_.span(row).start);
    Published& copy = block_.published(stage, row);
    const Word now = unpack(load_relaxed(&copy.word));
    // Tokens start-1 .. start-1 + capacity are one ring.
    if (begin < start || begin > now.length || length < begin || length - begin > left ||
        length - start >= block_.capacity() || committed < start || committed > length ||
        length - begin + kSequenceWords > left)
      return 0;
    if (epoch != now.epoch) {
      // Published before tokens are overwritten.
      store_release(&copy.word, pack({epoch, begin}));
      fence_release(Scope::kSystem);
    }
    std::int32_t* ring = block_.ring(stage, row);
    const std::uint32_t mask = block_.capacity() - 1;
    for (std::uint32_t p = begin; p < length; ++p)
      store_relaxed(&ring[p & mask], words[kSequenceWords + p - begin]);
    // Within one epoch a length only grows: a sender that begins again repeats what is there.
    if (epoch != now.epoch || length > now.length) store_release(&copy.word, pack({epoch, length}));
    if (committed > load_relaxed(&copy.committed)) store_relaxed(&copy.committed, committed);
    rung |= 1u << stage;
    return kSequenceWords + length - begin;
  }

  std::uint32_t apply_counters(const std::int32_t* words, std::uint32_t left, std::uint32_t stage,
                               std::uint32_t row) {
    if (left < 4) return 0;
    const std::uint32_t values = at(words, 3);
    if (values < kSingleCounters || values > kSingleCounters + kHistogram || values > left - 4)
      return 0;
    Counters& c = block_.priv(stage, row).counters;
    words += 4;
    for (std::uint64_t* value : {&c.steps, &c.fed, &c.drafted, &c.accepted, &c.produced, &c.adopted,
                                 &c.truncated, &c.rollbacks})
      store_relaxed(value, std::uint64_t{static_cast<std::uint32_t>(*words++)});
    for (std::uint32_t bin = 0; bin < values - kSingleCounters; ++bin)
      store_relaxed(&c.histogram[bin], std::uint64_t{static_cast<std::uint32_t>(*words++)});
    return 4 + values;
  }

  Block block_;
  bool controls_;
  bool is_senders_[kMaxStages] = {};
};

}  // namespace pipespec
