// What the caller of generate() does to the block: attach, put the rows at the end of their
// prompts, start and stop the stages, read tokens, end a row. Host only; arguments come from
// Python, so they are checked here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../protocol/commit.hpp"
#include "park.hpp"

namespace pipespec {

// Whether the header still has the sizes with which the block was attached or laid out.
inline bool is_intact(const Block& block) {
  const Header& h = block.header();
  return h.magic == kMagic && h.bytes == block.size() && h.stages == block.stages() &&
         h.rows == block.rows() && h.capacity == block.capacity() &&
         h.alignment == block.alignment();
}

// A view of the block at `base`.
inline Block attach(void* base) {
  const Block block(base);
  const auto is_power_of_two = [](std::uint32_t n) { return n != 0 && (n & (n - 1)) == 0; };
  if (!is_intact(block) || block.stages() < 1 || block.stages() > kMaxStages || block.rows() < 1 ||
      !is_power_of_two(block.capacity()) || !is_power_of_two(block.alignment()) ||
      block.alignment() < kLine)
    throw std::invalid_argument(
        "this memory holds no pipespec state block, or one of another version");
  return block;
}

// starts[r]: prompt length; limits[r]: position at which the row ends at the latest; last[r]: the
// prompt's last token.
inline void reset(const Block& block, const std::vector<std::uint32_t>& starts,
                  const std::vector<std::uint32_t>& limits, const std::vector<std::int32_t>& last,
                  const std::vector<std::int32_t>& eos) {
  if (starts.size() != limits.size() || starts.size() != last.size())
    throw std::invalid_argument("starts, limits and last must have one entry per row");
  if (starts.size() > block.rows())
    throw std::invalid_argument("the block has room for " + std::to_string(block.rows()) +
                                " rows, not " + std::to_string(starts.size()));
  if (eos.size() > kMaxEos)
    throw std::invalid_argument("at most " + std::to_string(kMaxEos) +
                                " end-of-sequence ids, got " + std::to_string(eos.size()));
  for (std::size_t r = 0; r < starts.size(); ++r) {
    if (starts[r] < 1)
      throw std::invalid_argument("row " + std::to_string(r) + ": the prompt is empty");
    if (limits[r] < starts[r] || limits[r] - starts[r] + 1 > block.capacity())
      throw std::invalid_argument("row " + std::to_string(r) + ": positions " +
                                  std::to_string(starts[r]) + " to " + std::to_string(limits[r]) +
                                  " do not fit a ring of " + std::to_string(block.capacity()));
  }
  Header& h = block.header();
  h.active_rows = static_cast<std::uint32_t>(starts.size());
  h.n_eos = static_cast<std::uint32_t>(eos.size());
  for (std::size_t i = 0; i < eos.size(); ++i) h.eos[i] = eos[i];
  for (std::uint32_t r = 0; r < h.active_rows; ++r)
    reset_row(block, r, starts[r], limits[r], last[r]);
}

// How far the draft `stage` may run ahead, from its next step on. 0 sends it to sleep until the
// lookahead is opened again or the generation ends; unlike a stage that found nothing to do, it is
// not woken by its neighbours' publications in between.
inline void set_lookahead(const Block& block, std::uint32_t stage, std::uint32_t lookahead) {
  if (stage >= block.target()) throw std::invalid_argument("the block has no such draft");
  std::uint32_t* word = &block.control(stage).lookahead;
  const std::uint32_t before = load_relaxed(word);
  if (before == lookahead) return;
  store_release(word, lookahead);
  if (before == 0) futex_wake(word);
  Bells(block, Bells::kCaller).ring();  // the draft may sleep at its old lookahead
}

// Generation 0 stops every stage before its next step. Any other number starts the stages that wait
// for this generation.
inline void start(const Block& block, std::uint32_t generation) {
  store_release(&block.header().generation, generation);
  Bells(block, Bells::kCaller).ring();
  if (generation != 0) return;
  // Stored after the generation: a draft that sees an open lookahead again also sees the stop.
  for (std::uint32_t s = 0; s < block.target(); ++s)
    if (load_relaxed(&block.control(s).lookahead) == 0) set_lookahead(block, s, 1);
}

inline std::vector<std::int32_t> tokens(const Block& block, std::uint32_t stage, std::uint32_t row,
                                        std::uint32_t begin, std::uint32_t end) {
  const Sequence sequence(block, stage, row);
  if (begin > end || end > sequence.word().length || end - begin > block.capacity())
    throw std::out_of_range("tokens [" + std::to_string(begin) + ", " + std::to_string(end) +
                            ") do not exist");
  std::vector<std::int32_t> out;
  out.reserve(end - begin);
  for (std::uint32_t p = begin; p < end; ++p) out.push_back(sequence.token(p));
  return out;
}

// The row ends where the target stands: no stage appends to it any more.
inline void end_row(const Block& block, std::uint32_t row) {
  store_release(&block.span(row).limit, Sequence(block, block.target(), row).word().length);
}

}  // namespace pipespec
