// The n-gram index against a plain search, over random texts with appends, truncations and
// rewrites; and the index as the last draft of a chain.
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.hpp"
#include "cpu/ngram.hpp"
#include "runtime/generation.hpp"
#include "runtime/ngram_stage.hpp"

using namespace pipespec;

namespace {

using Text = std::vector<std::int32_t>;

// Where the last n tokens of `text` end in `in`, and another token follows, the latest one first.
std::vector<std::size_t> ends(const Text& text, std::size_t n, const Text& in) {
  std::vector<std::size_t> found;
  for (std::size_t end = in.size() - std::min<std::size_t>(in.size(), 1); end-- > 0;) {
    std::size_t same = 0;
    while (same < n && same <= end && in[end - same] == text[text.size() - 1 - same]) ++same;
    if (same == n) found.push_back(end);
  }
  return found;
}

NgramIndex::Match own_match(const Text& text, std::size_t min_match, std::size_t max_match) {
  for (std::size_t n = std::min(max_match, text.size()); n >= min_match; --n)
    if (const auto found = ends(text, n, text); !found.empty())
      return {text[found[0] + 1], static_cast<std::uint32_t>(n)};
  return {NgramIndex::kNone, 0};
}

// By counting all occurrences.
NgramCorpus::Follower corpus_follower(const Text& text, const Text& corpus, std::size_t max_match) {
  for (std::size_t n = std::min(max_match, text.size()); n >= 1; --n) {
    const auto found = ends(text, n, corpus);
    if (found.empty()) continue;
    std::map<std::int32_t, std::size_t> counts;
    for (const std::size_t end : found) ++counts[corpus[end + 1]];
    NgramCorpus::Follower best{NgramCorpus::kNone, 0};
    std::size_t most = 0;
    for (const std::size_t end : found)
      if (const std::int32_t token = corpus[end + 1]; counts[token] > most)
        best.token = token, most = counts[token];
    const double all = static_cast<double>(found.size());
    best.certainty =
        static_cast<float>(static_cast<double>(most) / (all + 3.0 / static_cast<double>(n)));
    return best;
  }
  return {NgramCorpus::kNone, 0};
}

Text draw(std::mt19937& random, std::size_t count, std::uint32_t kinds) {
  Text out(count);
  for (auto& token : out) token = static_cast<std::int32_t>(random() % kinds);
  return out;
}

}  // namespace

TEST(an_index_finds_what_a_search_finds) {
  std::mt19937 random(1);
  std::uint32_t found = 0, none = 0, from_corpus = 0;
  for (std::uint32_t trial = 0; trial < check::trials(60, 1000); ++trial) {
    const std::uint32_t min_match = 1 + random() % 3, max_match = min_match + random() % 5;
    const std::uint32_t kinds = trial % 3 == 0 ? 2 : trial % 3 == 1 ? 5 : 40;
    // Of more than 64 occurrences a sample is read.
    const Text corpus = draw(random, random() % 65, kinds);
    const NgramCorpus more(corpus.data(), corpus.size(), max_match);
    NgramIndex index(min_match, max_match);
    Text text;
    for (int operation = 0; operation < 40; ++operation) {
      // A rewrite at any position: an append, a rollback, or tokens that are there already.
      const std::size_t at = text.size() - random() % (text.size() + 1) / (1 + random() % 8);
      Text tokens = draw(random, random() % 30, kinds);
      for (std::size_t i = 0; i < tokens.size() && at + i < text.size() && random() % 8 > 0; ++i)
        tokens[i] = text[at + i];
      text.resize(at);
      text.insert(text.end(), tokens.begin(), tokens.end());
      index.write(at, tokens.data(), tokens.size());
      CHECK_EQ(index.size(), text.size());
      const NgramIndex::Match own = own_match(text, min_match, max_match);
      CHECK_EQ(index.match().token, own.token);
      CHECK_EQ(index.match().length, own.length);
      const NgramCorpus::Follower wanted = corpus_follower(text, corpus, max_match);
      const NgramCorpus::Follower follower = more.follower(text.data() + text.size(), text.size());
      CHECK_EQ(follower.token, wanted.token);
      CHECK(std::abs(follower.certainty - wanted.certainty) < 1e-5f);
      ++(own.token == NgramIndex::kNone ? none : found);
      const NgramIndex::Match match = index.match(&more);
      if (match.length > NgramIndex::kMaxMatch) {
        ++from_corpus;
        CHECK_EQ(match.token, wanted.token);
        CHECK(wanted.certainty > 0.19f &&
              wanted.certainty > 0.12f * static_cast<float>(own.length));
        CHECK_EQ(match.length - NgramIndex::kMaxMatch - 1,
                 (follower.certainty >= 0.35f) + (follower.certainty >= 0.6f) + 0u);
      } else {
        CHECK_EQ(match.token, own.token);
        CHECK(own.length > 0 || wanted.certainty < 0.21f);
      }
    }
  }
  CHECK(found > 100 && none > 100 && from_corpus > 100);
}

// The share of a sample stands for that of all occurrences.
TEST(a_corpus_with_many_occurrences_is_sampled) {
  Text corpus;
  for (std::int32_t i = 0; i < 3000; ++i) {
    corpus.push_back(7);
    corpus.push_back(i % 3 == 0 ? 1 : 2);
  }
  const NgramCorpus more(corpus.data(), corpus.size(), 4);
  const Text text{9, 7};
  const NgramCorpus::Follower follower = more.follower(text.data() + 2, 2);
  CHECK_EQ(follower.token, 2);
  CHECK(follower.certainty > 0.5f && follower.certainty < 0.8f);
}

// The index as the last draft: in each round its own tokens, those of the stage upstream, or none.
// The text is the target's, foresee() counts what fill() drafts, and every token that the target
// verifies comes from the source that the round has chosen.
TEST(passes_on_the_tokens_upstream_or_its_own) {
  constexpr std::uint32_t kWidth = 16, kMost = 5;
  std::uint64_t relayed = 0, drafted = 0, rested = 0;
  for (std::uint32_t trial = 0; trial < check::trials(200, 4000); ++trial) {
    std::mt19937 random(trial);
    const std::uint32_t start = 1 + random() % 20, limit = start + 30 + random() % 60;
    const Text phrase = draw(random, 4 + random() % 12, 50);
    Text text;
    while (text.size() < 120) {
      text.insert(text.end(), phrase.begin(), phrase.end());
      text.back() = static_cast<std::int32_t>(random() % 50);
    }
    std::vector<std::uint64_t> memory(Block::bytes(3, 1, 128) / 8 + kLine / 8 + 1);
    void* base = reinterpret_cast<void*>(
        (reinterpret_cast<std::uintptr_t>(memory.data()) + kLine - 1) / kLine * kLine);
    const Block block = Block::create(base, 3, 1, 128);
    reset(block, {start}, {limit}, {text[start - 1]}, {});
    StagePort model(block, 0, kWidth), target(block, 2, kWidth);
    NgramStage last(block, 1, kWidth, NgramIndex(2, 4), nullptr);
    last.prefill(0, text.data(), start - 1);
    std::vector<std::int32_t> selected(kWidth);
    const auto length = [&](std::uint32_t stage) {
      return Sequence(block, stage, 0).word().length;
    };
    for (;;) {
      const std::uint32_t count = 1 + random() % kMost, choice = random() % 3;
      const NgramStage::Outlook outlook = last.foresee(0, count);
      const std::uint32_t committed = length(2);
      CHECK_EQ(length(1), committed);  // nothing is published by foresee()
      if (choice == 0) {
        // The model is right with a chance of 3 in 4.
        for (Action action; (action = model.plan(count, 0, 0)) == Action::kStep;) {
          if (!model.selects()) {
            model.commit(selected.data(), kWidth);
            continue;
          }
          const std::uint32_t at = model.kv()[0] + model.query_lens()[0];
          selected[0] = random() % 4 != 0 ? text[at] : 77;
          model.commit(selected.data(), kWidth);
        }
        last.relay(count);
        CHECK_EQ(length(1), std::max(committed, std::min(length(0), limit - 1)));
        relayed += length(1) - committed;
      } else if (choice == 1) {
        last.fill(count);
        CHECK_EQ(length(1) - committed, std::min(outlook.tokens, limit - committed));
        drafted += length(1) - committed;
      } else {
        ++rested;
      }
      const std::uint32_t offered = length(1) - committed;
      const Action action = target.plan(0, choice == 2 ? 0 : count, 0);
      if (action == Action::kFinished) break;
      if (!CHECK(action == Action::kStep)) return;
      CHECK_EQ(static_cast<std::uint32_t>(target.num_draft_tokens()[0]),
               std::min(offered, limit - committed - 1));
      for (std::int32_t i = 0; i < target.query_lens()[0]; ++i)
        selected[i] = text[target.kv()[0] + i + 1];
      // The own choices begin after the tokens that were known.
      const std::int32_t known = target.query_lens()[0] - target.num_draft_tokens()[0];
      target.commit(selected.data() + known - 1, kWidth);
    }
    last.foresee(0, 1);
    CHECK(last.text(0, start) == Text(text.begin() + start, text.begin() + limit));
    CHECK(tokens(block, 2, 0, start, limit) == Text(text.begin() + start, text.begin() + limit));
  }
  CHECK(relayed > 1000 && drafted > 1000 && rested > 500);
}

TEST_MAIN()
