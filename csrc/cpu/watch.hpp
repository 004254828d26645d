// Whether memory that other code may write still has the values that it had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipespec::cpu {

// Digests of ranges of memory. Small ranges are compared in every check, and a few values of each
// large one. The rest is compared in turn: samples with a stride, and blocks with all their values.
// The ranges must exist during each call.
class MemoryWatch {
 public:
  // `stride` in bytes is the distance of the samples.
  void add(const void* data, std::size_t bytes, std::size_t stride);

  // Reads all ranges, by up to `threads` threads. After the last add(), before the first agree().
  void remember(int threads);

  // Reads a further range, of which no samples are compared. Some of the first ones are compared in
  // every check, the others in turn.
  void remember_block(const void* data, std::size_t bytes);

  // Begins a round: compares what every check compares, some samples and one block of what is
  // compared in turn, and more of it for about `seconds`, samples first, at most all.
  bool agree(double seconds);

  // Compares up to 64 MiB of what the round has left, by up to `threads` threads. Once nothing is
  // left, every byte was compared since the round began.
  bool rest_agrees(int threads);
  bool has_rest() const { return left_ != 0; }

  // The number of samples and of bytes.
  std::size_t samples() const;
  std::size_t bytes() const;

 private:
  struct Range {
    const unsigned char* data;
    std::size_t bytes, stride;
  };
  struct Unit {
    Range range;
    std::uint64_t digest;
  };

  static std::uint64_t digest_of(const Range& range);
  static bool is_same(const Unit& unit);

  std::vector<Range> ranges_;
  std::vector<Unit> always_, samples_, blocks_;
  std::size_t further_ = 0;  // ranges of remember_block() that every check compares
  std::size_t next_sample_ = 0, next_block_ = 0;
  std::size_t left_ = 0;  // blocks that the round has not compared
};

// A sum of all values that depends on their places.
std::uint64_t digest(const unsigned char* data, std::size_t bytes);

}  // namespace pipespec::cpu
