// Discrete-event simulation of a chain in virtual time, to predict what a schedule gives before it
// is run.
//
// asynchronous() calls the product's own StagePort, plan() and commit(). The protocol is executed
// and not modelled, so the simulation cannot differ from it. Only the forwards are modelled: their
// duration, and the tokens that the stages choose. reference_async() and reference_sync() are the
// published system (arXiv 2505.01572), for comparison. Each stage has a device of its own, and
// there is one row.
//
// No setting is checked (bench/perf_model.py makes them). Every function gives the same result for
// the same seed on every machine with IEEE doubles.
#pragma once

#include <cstdint>
#include <vector>

namespace pipespec::perf {

// The token that each stage chooses. Exactly one of `acceptance` and `table` is set.
//
// `acceptance[s]`: probability that stages s and s+1 choose the same token after the same text,
// independent between positions, contexts and pairs. Two texts that have parted never become equal
// again by chance.
//
// `table`: [positions][stages - 1] bytes, one row per position of the target's text: 0 where the
// draft chooses the target's token; equal numbers are equal tokens. The table replays a text, with
// its correlations between stages and along the text. After a text that is not the target's, the
// row of a pseudo-random position applies. Positions past the end begin again.
struct Answers {
  std::vector<double> acceptance;
  std::vector<std::uint8_t> table;
};

struct StageModel {
  std::vector<double>
      step_s;  // seconds of a step that feeds [i] + 1 columns; the last for all wider ones
  double start_s = 0.0;                // when its prompt is ready
  std::uint32_t lookahead = 0;         // as in StepPolicy
  std::uint32_t max_draft_tokens = 0;  // as in StepPolicy
  std::uint32_t min_draft_tokens = 0;  // as in StepPolicy, with a deadline
};

struct Setting {
  std::vector<StageModel> stages;
  Answers answers;
  std::uint32_t tokens = 0;  // new tokens
  std::uint32_t width = 64;  // columns of a step
  std::uint64_t seed = 0;
  // asynchronous() only:
  double patience = 1.5;  // deadline of a wait: this * min_draft_tokens * mean step of upstream
  // With fewer draft tokens than `min_draft_tokens`, decode one token and leave the draft tokens
  // alone, instead of sleeping. For targets whose one-token steps cost much less than wider ones.
  bool decode_meanwhile = false;
  // Idealisations, to check closed forms; no driver has them:
  bool preempt = false;      // a draft drops its running forward when a correction makes it useless
  double handshake_s = 0.0;  // pause of a verifier and its upstream after each step of the verifier
  // reference_*() only; its handshake_s is the fixed cost of one acknowledgement:
  std::uint32_t lookahead = 0;
};

struct StageResult {
  std::uint64_t steps = 0;     // forwards
  std::uint64_t drafted = 0;   // draft tokens fed
  std::uint64_t accepted = 0;  // draft tokens that survived
  std::uint64_t rollbacks = 0;
  std::vector<std::uint64_t> histogram;  // [n]: steps that appended n tokens
};

struct Result {
  double seconds = 0.0;  // until the target's text is complete
  std::uint64_t tokens = 0;
  std::vector<StageResult> stages;
};

// Every stage runs whenever plan() finds something to do: the asynchronous schedules.
Result asynchronous(const Setting& setting);
// The published system: minimum lookahead `lookahead`, a request and its acknowledgement after
// every verification, corrections hop by hop, no bonus adopted, stage 0 without bound.
Result reference_async(const Setting& setting);
// Its synchronous baseline: rounds of lookahead - 1 drafts.
Result reference_sync(const Setting& setting);

}  // namespace pipespec::perf
