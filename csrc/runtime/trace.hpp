// What the steps of a stage did, one entry per step: a buffer of fixed size that its stage writes
// without a lock and that anybody may read meanwhile. The oldest entries are overwritten.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "../protocol/hd.hpp"
#include "launcher.hpp"

namespace pipespec {

struct TraceEntry {
  std::uint64_t step;        // number of the step, from 0
  std::int64_t launched_ns;  // when the scheduler launched it
  std::int64_t start_ns;     // the rest as in Outcome
  std::int64_t end_ns;
  std::uint32_t width;  // columns of the rectangle
  std::uint32_t fed;
  std::uint32_t hints;
  std::uint32_t accepted;
  std::uint32_t taken_back;
  std::uint32_t in_flight;  // steps launched before it that had not ended
};

class TraceBuffer {
 public:
  explicit TraceBuffer(std::uint32_t capacity)
      : capacity_(capacity), slots_(std::make_unique<Slot[]>(capacity)) {}

  // By the stage only.
  void write(const TraceEntry& entry) {
    std::uint64_t words[kWords];
    std::memcpy(words, &entry, sizeof entry);
    const std::uint64_t number = load_relaxed(&written_);
    Slot& slot = slots_[number % capacity_];
    // As in ring.hpp: the words release and their readers acquire, so who saw one that is too new
    // also sees that the slot was taken away from the entry that it is looking for.
    store_relaxed(&slot.holds, std::uint64_t{0});
    for (std::uint32_t i = 0; i < kWords; ++i) store_release(&slot.words[i], words[i]);
    store_release(&slot.holds, number + 1);
    store_release(&written_, number + 1);
  }

  // Entries that there were, also those that are lost.
  std::uint64_t written() const { return load_acquire(&written_); }

  // The entries that are left, oldest first; those that are overwritten while we read are left out.
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

 private:
  static_assert(std::is_trivially_copyable_v<TraceEntry> &&
                sizeof(TraceEntry) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(TraceEntry) / sizeof(std::uint64_t);
  struct Slot {
    std::uint64_t holds = 0;  // 1 + number of its entry; 0: none, or it is being written
    std::uint64_t words[kWords] = {};
  };

  std::uint64_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  std::uint64_t written_ = 0;
};

}  // namespace pipespec
