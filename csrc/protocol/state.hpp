// The state block: the state that the stages of one chain share, in one flat piece of memory.
// Threads, processes (shared memory) and GPUs (pinned or device memory) map it in the same way.
//
//   the caller's part:    Header  RowSpan[rows]  StageControl[stages]
//   the part of sleepers: Parked[stages]
//   a part per stage:     StageStatus  Published[rows]  Private[rows]  ring[rows][capacity]
//
// Every word has one writer, named next to it; Parked is the exception. Words of different writers
// lie on different cache lines. In memory that processes share, parts begin on page boundaries, so
// that a process can map as writable only what it writes: the target is the caller's, a draft
// writes its own part and Parked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hd.hpp"

namespace pipespec {

// Two 64-byte lines: x86 prefetches lines in pairs, and some arm64 parts have lines of 128 bytes.
inline constexpr std::size_t kLine = 128;
inline constexpr std::uint64_t kMagic = 0x38636570'73657069;  // changes with the layout
inline constexpr std::uint32_t kMaxEos = 64;
inline constexpr std::uint32_t kMaxStages = 16;
inline constexpr std::uint32_t kHistogram = 64;
inline constexpr std::uint32_t kCallersPart = 0, kParkedPart = 1, kFirstStagesPart = 2;

// Writer: the caller of generate(), while no stage runs. `generation` may also change while stages
// run: 0 stops them.
struct alignas(kLine) Header {
  std::uint64_t magic;
  std::uint64_t bytes;
  std::uint32_t stages;
  std::uint32_t rows;         // rows that the block has room for
  std::uint32_t active_rows;  // rows of the present generation
  std::uint32_t capacity;     // tokens per ring, a power of two
  std::uint32_t alignment;    // of the parts, a power of two
  std::uint32_t generation;   // 0: stop; else the number of the generation that runs
  std::uint32_t n_eos;
  std::int32_t eos[kMaxEos];
  std::uint32_t bell;  // the caller's own, rung when `generation` changes
};

// Writer: the caller. Positions count tokens of the row from 0, padding left out.
struct alignas(kLine) RowSpan {
  // Prompt length: the first position that is generated.
  std::uint32_t start;
  // No stage's sequence grows past this position. Lowering it to the target's length ends the row.
  std::uint32_t limit;
};

// Writer: the caller, at any time.
struct alignas(kLine) StageControl {
  // 0: the stage's process or thread has failed.
  std::uint32_t alive;
  // For a draft in a process of its own: how many tokens it may be ahead of the stage downstream,
  // and the maximum of draft tokens that downstream takes. The draft sleeps on this word while it
  // is 0.
  std::uint32_t lookahead;
};

// Writers: the sleeping stage stores 1, the stage that wakes it stores 0. Any other value only ends
// a sleep early, or delays its end up to its time limit.
struct alignas(kLine) Parked {
  std::uint32_t word;  // of a futex
};

// Writer: the stage.
struct alignas(kLine) StageStatus {
  // Counts publications; readers only compare it with an earlier value.
  std::uint32_t bell;
};

// Writer: the stage. `word` = epoch << 32 | length. The epoch grows with every rollback, so within
// one epoch the tokens below the length never change. Tokens below `committed` equal the target's
// and never change again.
struct alignas(kLine) Published {
  std::uint64_t word;
  std::uint32_t committed;
};

struct Counters {
  std::uint64_t steps;      // forwards in which this row selected a token
  std::uint64_t fed;        // tokens fed
  std::uint64_t drafted;    // draft tokens fed
  std::uint64_t accepted;   // draft tokens that survived
  std::uint64_t produced;   // tokens appended by its own steps: accepted ones and one of its own
  std::uint64_t adopted;    // tokens taken over from downstream
  std::uint64_t truncated;  // tokens rolled back
  std::uint64_t rollbacks;  // times tokens were rolled back
  // Steps by number of accepted draft tokens; the last bin counts that many or more.
  std::uint64_t histogram[kHistogram];
};

// Writer: the stage. Of these, others read the counters: the caller for its report.
struct alignas(kLine) Private {
  // Tokens whose keys and values exist.
  std::uint32_t kv;
  // The stage has compared itself with its downstream neighbour up to this position,
  std::uint32_t agreed;
  // in this epoch of the neighbour.
  std::uint32_t seen_epoch;
  // What replicate() has copied to the host shadow, so that it need not read that over the bus.
  std::uint32_t mirrored_committed;
  std::uint64_t mirrored_word;
  Counters counters;
};

static_assert(sizeof(Header) % kLine == 0 && sizeof(RowSpan) == kLine);
static_assert(sizeof(StageControl) == kLine && sizeof(Parked) == kLine &&
              sizeof(StageStatus) == kLine && sizeof(Published) == kLine &&
              sizeof(Private) % kLine == 0);

struct Word {
  std::uint32_t epoch;
  std::uint32_t length;
};

PIPESPEC_HD inline std::uint64_t pack(Word w) { return std::uint64_t{w.epoch} << 32 | w.length; }
PIPESPEC_HD inline Word unpack(std::uint64_t w) {
  return {static_cast<std::uint32_t>(w >> 32), static_cast<std::uint32_t>(w)};
}

// A view of the block: a pointer and the offsets computed from its header's sizes. Copies are cheap
// and share the block.
class Block {
 public:
  Block() = default;  // for the device too: nvcc refuses marks on defaulted functions
  // `scope`: who shares it while kernels run over it.
  PIPESPEC_HD explicit Block(void* base, Scope scope = Scope::kSystem)
      : base_(static_cast<char*>(base)),
        stages_(header().stages),
        rows_(header().rows),
        capacity_(header().capacity),
        alignment_(header().alignment),
        scope_(scope) {
    parked_offset_ = part_bytes(kCallersPart, stages_, rows_, capacity_, alignment_);
    stages_offset_ =
        parked_offset_ + part_bytes(kParkedPart, stages_, rows_, capacity_, alignment_);
    stage_bytes_ = part_bytes(kFirstStagesPart, stages_, rows_, capacity_, alignment_);
  }

  // Room for `capacity` tokens per row and stage. Capacity and alignment must be powers of two, the
  // alignment kLine or more.
  PIPESPEC_HD static std::size_t bytes(std::uint32_t stages, std::uint32_t rows,
                                       std::uint32_t capacity, std::uint32_t alignment = kLine) {
    return part_bytes(kCallersPart, stages, rows, capacity, alignment) +
           part_bytes(kParkedPart, stages, rows, capacity, alignment) +
           stages * part_bytes(kFirstStagesPart, stages, rows, capacity, alignment);
  }
  // Of one of the stages + 2 parts. All stages' parts have one size.
  PIPESPEC_HD static std::size_t part_bytes(std::uint32_t part, std::uint32_t stages,
                                            std::uint32_t rows, std::uint32_t capacity,
                                            std::uint32_t alignment) {
    const std::size_t used =
        part == kCallersPart
            ? sizeof(Header) + rows * sizeof(RowSpan) + stages * sizeof(StageControl)
        : part == kParkedPart
            ? stages * sizeof(Parked)
            : sizeof(StageStatus) + rows * (sizeof(Published) + sizeof(Private) +
                                            ring_words(capacity) * sizeof(std::int32_t));
    return (used + alignment - 1) & ~(std::size_t{alignment} - 1);
  }

  // Lays the block out in zeroed memory of at least bytes(...) bytes.
  PIPESPEC_HD static Block create(void* base, std::uint32_t stages, std::uint32_t rows,
                                  std::uint32_t capacity, std::uint32_t alignment = kLine) {
    Header& h = *static_cast<Header*>(base);
    h.magic = kMagic;
    h.bytes = bytes(stages, rows, capacity, alignment);
    h.stages = stages;
    h.rows = rows;
    h.capacity = capacity;
    h.alignment = alignment;
    return Block(base);
  }

  PIPESPEC_HD Header& header() const { return *reinterpret_cast<Header*>(base_); }
  PIPESPEC_HD RowSpan& span(std::uint32_t row) const {
    return reinterpret_cast<RowSpan*>(base_ + sizeof(Header))[row];
  }
  PIPESPEC_HD StageControl& control(std::uint32_t stage) const {
    return reinterpret_cast<StageControl*>(base_ + sizeof(Header) + rows_ * sizeof(RowSpan))[stage];
  }
  PIPESPEC_HD std::uint32_t& parked(std::uint32_t stage) const {
    return reinterpret_cast<Parked*>(base_ + parked_offset_)[stage].word;
  }
  PIPESPEC_HD StageStatus& status(std::uint32_t stage) const {
    return *reinterpret_cast<StageStatus*>(base_ + stages_offset_ + stage * stage_bytes_);
  }
  PIPESPEC_HD Published& published(std::uint32_t stage, std::uint32_t row) const {
    return reinterpret_cast<Published*>(&status(stage) + 1)[row];
  }
  PIPESPEC_HD Private& priv(std::uint32_t stage, std::uint32_t row) const {
    return reinterpret_cast<Private*>(&published(stage, rows_))[row];
  }
  PIPESPEC_HD std::int32_t* ring(std::uint32_t stage, std::uint32_t row) const {
    Private* rings = &priv(stage, rows_);
    return reinterpret_cast<std::int32_t*>(rings) + std::size_t{row} * ring_words(capacity_);
  }
  PIPESPEC_HD std::uint32_t stages() const { return stages_; }
  PIPESPEC_HD std::uint32_t rows() const { return rows_; }
  PIPESPEC_HD std::uint32_t capacity() const { return capacity_; }
  PIPESPEC_HD std::uint32_t alignment() const { return alignment_; }
  PIPESPEC_HD std::size_t size() const { return stages_offset_ + stages_ * stage_bytes_; }
  // Rows of the present generation. In damaged memory, too, no row that does not exist.
  PIPESPEC_HD std::uint32_t active_rows() const {
    const std::uint32_t rows = header().active_rows;
    return rows < rows_ ? rows : rows_;
  }
  PIPESPEC_HD std::uint32_t target() const { return stages_ - 1; }
  PIPESPEC_HD Scope scope() const { return scope_; }

  PIPESPEC_HD bool is_eos(std::int32_t token) const {
    const Header& h = header();
    for (std::uint32_t i = 0; i < kMaxEos && i < h.n_eos; ++i)
      if (h.eos[i] == token) return true;
    return false;
  }

 private:
  // Each ring fills whole cache lines, so that no line holds tokens of two rows.
  PIPESPEC_HD static std::size_t ring_words(std::uint32_t capacity) {
    constexpr std::size_t per_line = kLine / sizeof(std::int32_t);
    return (capacity + per_line - 1) / per_line * per_line;
  }

  char* base_ = nullptr;
  std::uint32_t stages_ = 0;
  std::uint32_t rows_ = 0;
  std::uint32_t capacity_ = 0;
  std::uint32_t alignment_ = kLine;
  Scope scope_ = Scope::kSystem;
  std::size_t parked_offset_ = 0;
  std::size_t stages_offset_ = 0;
  std::size_t stage_bytes_ = 0;
};

}  // namespace pipespec
