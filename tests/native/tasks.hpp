// Texts for chains of fake models to make: prompts and limits of rows, the models, and the checks
// of what came out.
#pragma once

#include <string>
#include <vector>

#include "check.hpp"
#include "fake_stage.hpp"
#include "runtime/generation.hpp"

namespace fake {

using Caches = std::vector<Cache>;  // of one stage, by row

// The columns of one step of a stage.
struct Columns {
  const std::int32_t *tokens, *kv, *query_lens, *num_draft_tokens, *n_select;
  std::uint32_t width;  // of a row of tokens
};

// A forward over all rows, and its choices in rows of `columns`.
inline void forward(Caches& caches, const Columns& of, std::int32_t* selected,
                    std::uint32_t columns) {
  using u32 = std::uint32_t;
  for (u32 r = 0; r < caches.size(); ++r) {
    const std::int32_t* tokens = of.tokens + std::size_t{r} * of.width;
    const auto kv = static_cast<u32>(of.kv[r]);
    caches[r].feed(tokens, kv, static_cast<u32>(of.query_lens[r]), columns);
    caches[r].select(tokens, kv, static_cast<u32>(of.n_select[r]),
                     static_cast<u32>(of.num_draft_tokens[r]), selected + std::size_t{r} * columns,
                     columns);
  }
}

// The columns that a port has planned.
template <class Port>
Columns columns_of(Port& port) {
  return {&port.tokens()[0],           &port.kv()[0],       &port.query_lens()[0],
          &port.num_draft_tokens()[0], &port.n_select()[0], port.width()};
}

// Checks that every cache holds its stage's sequence after all truncations and refills.
inline bool check_caches(const pipespec::Block& block, std::uint32_t stage, const Caches& caches,
                         const std::vector<Tokens>& prompts) {
  for (std::uint32_t r = 0; r < prompts.size(); ++r) {
    const pipespec::Sequence sequence(block, stage, r);
    for (std::uint32_t p = 0; p < block.priv(stage, r).kv; ++p)
      if (!CHECK_EQ(caches[r].entries()[p],
                    p < prompts[r].size() ? prompts[r][p] : sequence.token(p)))
        return false;
  }
  return true;
}

struct Task {
  Truth truth;
  std::vector<Model> models;
  std::vector<Tokens> prompts;
  std::vector<std::uint32_t> limits;
  std::uint64_t seed;

  // Each text gets at most `length` tokens.
  Task(std::uint32_t stages, std::uint32_t rows, std::uint32_t length, std::uint64_t of)
      : truth{.seed = mix(of), .eos = {3, 2}}, seed(of) {
    Random random{of};
    truth.eos_rate = random.pick({0.0, 0.02});
    truth.vocabulary = random.pick({4, 40});
    for (std::uint32_t s = 0; s < stages; ++s)
      models.push_back(
          {&truth, s + 1 == stages ? 1.0 : random.pick({0.0, 0.6, 0.9, 1.0}), random.below(3)});
    for (std::uint32_t r = 0; r < rows; ++r) {
      prompts.emplace_back();
      for (std::uint32_t i = 1 + random.below(4); i > 0; --i)
        prompts[r].push_back(static_cast<std::int32_t>(random.below(9)));
      limits.push_back(static_cast<std::uint32_t>(prompts[r].size()) + 1 + random.below(length));
    }
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  std::uint32_t stages() const { return static_cast<std::uint32_t>(models.size()); }

  // The beginning of a generation in `block`.
  void reset(const pipespec::Block& block) const {
    std::vector<std::uint32_t> starts;
    Tokens last;
    for (const Tokens& prompt : prompts) {
      starts.push_back(static_cast<std::uint32_t>(prompt.size()));
      last.push_back(prompt.back());
    }
    pipespec::reset(block, starts, limits, last, truth.eos);
  }

  // A stage's caches after the prompts.
  Caches caches(std::uint32_t stage) const {
    Caches made(prompts.size(), Cache(models[stage]));
    for (std::uint32_t r = 0; r < prompts.size(); ++r) made[r].prefill(prompts[r]);
    return made;
  }

  // Checks the target's rows: the whole plain text, or with `part` a beginning of it.
  bool check_text(const pipespec::Block& block, bool part = false) const {
    for (std::uint32_t r = 0; r < prompts.size(); ++r) {
      const Tokens text = plain(models.back(), prompts[r], limits[r]);
      const auto begin = static_cast<std::uint32_t>(prompts[r].size()) - 1;
      const pipespec::Word word = pipespec::Sequence(block, block.target(), r).word();
      if (!CHECK(part ? word.length <= text.size() : word.length == text.size()) ||
          !CHECK_EQ(pipespec::tokens(block, block.target(), r, begin, word.length),
                    Tokens(text.begin() + begin, text.begin() + word.length)) ||
          !CHECK_EQ(word.epoch, 0u))
        return false;
    }
    return true;
  }
};

}  // namespace fake
