// One entry per step of a stage, in a buffer of fixed size. The stage writes without a lock, and
// any thread or process may read meanwhile. New entries overwrite the oldest.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "../protocol/state.hpp"

namespace pipespec {

// Times are those of CLOCK_MONOTONIC, which the processes of a machine share. Counts are of all
// rows together.
struct TraceEntry {
  std::uint64_t step;        // number of the entry, from 0
  std::int64_t launched_ns;  // when the step was launched, or its plan began
  std::int64_t start_ns;
  std::int64_t end_ns;
  std::uint32_t width;  // columns of the rectangle
  std::uint32_t fed;
  std::uint32_t draft_tokens;
  std::uint32_t accepted;
  std::uint32_t rolled_back;  // tokens
  std::uint32_t in_flight;    // steps launched before it that had not ended
  std::uint32_t rollbacks;    // times tokens were rolled back
  std::uint32_t prefill;      // tokens of the prompts that this entry cached; 0 for a step
};

// Of all rows, since the block was reset.
struct TraceTotals {
  std::uint64_t fed, draft_tokens, accepted, rolled_back, rollbacks;
};

class TraceBuffer {
 public:
  static std::size_t bytes(std::uint32_t capacity) {
    return sizeof(Head) + capacity * sizeof(Slot);
  }

  // In zeroed memory of bytes(capacity) bytes, which outlives it: one object per process that maps
  // it.
  TraceBuffer(void* memory, std::uint32_t capacity)
      : capacity_(capacity),
        head_(static_cast<Head*>(memory)),
        slots_(reinterpret_cast<Slot*>(head_ + 1)) {
    if (capacity == 0) throw std::invalid_argument("a trace needs room for an entry");
  }
  // In memory of its own.
  explicit TraceBuffer(std::uint32_t capacity)
      : TraceBuffer(std::make_unique<std::uint64_t[]>(bytes(capacity) / sizeof(std::uint64_t)),
                    capacity) {}

  // By the stage only.
  void write(const TraceEntry& entry) {
    std::uint64_t words[kWords];
    std::memcpy(words, &entry, sizeof entry);
    const std::uint64_t number = load_relaxed(&head_->written);
    Slot& slot = slots_[number % capacity_];
    // As in ring.hpp: the words release and their readers acquire. A reader that sees a word of the
    // new entry also sees that the slot no longer holds the old one.
    store_relaxed(&slot.holds, std::uint64_t{0});
    for (std::uint32_t i = 0; i < kWords; ++i) store_release(&slot.words[i], words[i]);
    store_release(&slot.holds, number + 1);
    store_release(&head_->written, number + 1);
  }

  // The number of entries written so far, lost ones included.
  std::uint64_t written() const { return load_acquire(&head_->written); }

  // The entries in the buffer, oldest first, without those that are overwritten during the read.
  std::vector<TraceEntry> read() const {
    const std::uint64_t end = written();
    std::vector<TraceEntry> out;
    for (std::uint64_t number = end < capacity_ ? 0 : end - capacity_; number < end; ++number) {
      const Slot& slot = slots_[number % capacity_];
      std::uint64_t words[kWords];
      for (std::uint32_t i = 0; i < kWords; ++i) words[i] = load_acquire(&slot.words[i]);
      if (load_relaxed(&slot.holds) != number + 1) continue;
      out.emplace_back();
      std::memcpy(&out.back(), words, sizeof words);
    }
    return out;
  }

  // The counters up to the last entry. Only the stage uses them; all its ports share them.
  TraceTotals& recorded() { return head_->recorded; }

  // Drops all entries. While no thread or process reads or writes.
  void clear() {
    head_->recorded = {};
    store_release(&head_->written, std::uint64_t{0});
  }

 private:
  static_assert(std::is_trivially_copyable_v<TraceEntry> &&
                sizeof(TraceEntry) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(TraceEntry) / sizeof(std::uint64_t);
  struct Head {
    std::uint64_t written;
    TraceTotals recorded;
    char padding[kLine - sizeof(std::uint64_t) - sizeof(TraceTotals)];
  };
  struct Slot {
    std::uint64_t holds;  // 1 + number of its entry; 0: none, or it is being written
    std::uint64_t words[kWords];
  };
  using Own = std::unique_ptr<std::uint64_t[]>;

  TraceBuffer(Own own, std::uint32_t capacity) : TraceBuffer(own.get(), capacity) {
    own_ = std::move(own);
  }

  std::uint64_t capacity_;
  Head* head_;
  Slot* slots_;
  Own own_;
};

}  // namespace pipespec
