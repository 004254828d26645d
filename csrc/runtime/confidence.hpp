// Policies that use how sure the stages are of their tokens: the chance that a draft token is kept,
// learned from those that were; where a draft stops; when a target verifies, decodes or waits. Host
// only. Wrong numbers, and garbage in shared memory, cost speed: no token depends on them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../protocol/confidence.hpp"
#include "../protocol/ring.hpp"

namespace pipespec {

// The calibrated chance that the stage of `learned` keeps a draft token with this confidence.
// Until it has seen some, the stage upstream is taken at its word.
inline double chance_of(const Calibration& learned, std::uint32_t confidence) {
  constexpr double kPrior = 4.0;  // tokens that the stated chance counts as
  const std::uint32_t bin = confidence_bin(confidence);
  const std::uint32_t seen = load_relaxed(&learned.seen[bin]);
  const std::uint32_t kept = std::min(load_relaxed(&learned.kept[bin]), seen);
  return (kept + kPrior * stated_chance(bin)) / (seen + kPrior);
}

// Of a draft token whose confidence is not yet known, as drafts have been so far.
inline double mean_chance(const Calibration& learned) {
  double seen = 4.0, kept = 3.0;
  for (std::uint32_t bin = 0; bin < kConfidenceBins; ++bin) {
    const std::uint32_t n = load_relaxed(&learned.seen[bin]);
    seen += n;
    kept += std::min(load_relaxed(&learned.kept[bin]), n);
  }
  return kept / seen;
}

// Called by the stage that `learned` belongs to, after it has compared a draft token.
inline void learn(Calibration& learned, std::uint32_t confidence, bool is_kept) {
  constexpr std::uint32_t kMost = 1024;  // then older tokens count half: texts differ
  const std::uint32_t bin = confidence_bin(confidence);
  const double error = chance_of(learned, confidence) - (is_kept ? 1.0 : 0.0);
  std::uint32_t seen = load_relaxed(&learned.seen[bin]) + 1;
  std::uint32_t kept = load_relaxed(&learned.kept[bin]) + (is_kept ? 1 : 0);
  if (seen >= kMost) {
    seen /= 2;
    kept /= 2;
  }
  store_relaxed(&learned.seen[bin], seen);
  store_relaxed(&learned.kept[bin], kept);
  store_relaxed(&learned.outcomes, load_relaxed(&learned.outcomes) + 1);
  store_relaxed(&learned.squared_error, load_relaxed(&learned.squared_error) +
                                            static_cast<std::uint64_t>(error * error * 0x1p32));
}

// Seconds of a stage's step by its columns, from the steps that it made: one column, and a straight
// line for more. A busy machine makes steps longer and never shorter, so shorter times count more.
class StepCosts {
 public:
  void note(std::uint32_t columns, double seconds) {
    if (columns == 0 || !(seconds > 0.0) || !std::isfinite(seconds)) return;
    Width& width = widths_[std::min(columns, kMost) - 1];
    if (width.count == 0.0) {
      // Not from one slow step: what the other widths say rises with more of them.
      width.seconds = weight_ > 0.0 ? std::min(seconds, of(columns)) : seconds;
    } else if (seconds < width.seconds) {
      width.seconds += 0.5 * (seconds - width.seconds);
    } else {
      width.seconds += (std::min(seconds, 2.0 * width.seconds) - width.seconds) / kMemory;
    }
    width.count = std::min(width.count + 1.0, kMemory);
    fit();
  }

  bool is_known() const { return widths_[0].count > 0.0 || weight_ > 0.0; }

  double of(std::uint32_t columns) const {
    const double single = widths_[0].count > 0.0 ? widths_[0].seconds : 0.0;
    if (weight_ == 0.0 || (columns <= 1 && single > 0.0)) return single;
    // A line may lead below what no step takes less than.
    return std::max(mean_ + column_ * (columns - mean_columns_),
                    0.5 * (single > 0.0 ? single : mean_));
  }

  // Of one more column.
  double column() const { return column_; }

 private:
  static constexpr std::uint32_t kMost = 64;  // columns; more are counted as so many
  static constexpr double kMemory = 16.0;     // steps
  struct Width {
    double seconds = 0.0, count = 0.0;
  };

  // The line through the widths of at least two columns, each with the weight of its steps.
  void fit() {
    weight_ = column_ = mean_ = mean_columns_ = 0.0;
    double spread = 0.0, together = 0.0;
    for (std::uint32_t i = 1; i < kMost; ++i) {
      const Width& width = widths_[i];
      if (width.count == 0.0) continue;
      // Welford's update, with weights.
      weight_ += width.count;
      const double share = width.count / weight_, x = i + 1.0;
      const double dx = x - mean_columns_, dy = width.seconds - mean_;
      mean_columns_ += share * dx;
      mean_ += share * dy;
      spread += width.count * dx * (x - mean_columns_);
      together += width.count * (x - mean_columns_) * dy;
    }
    if (spread > 0.0) column_ = std::max(0.0, together / spread);
  }

  std::array<Width, kMost> widths_{};
  double weight_ = 0.0, column_ = 0.0, mean_ = 0.0, mean_columns_ = 0.0;
};

// Of a stage whose step lasts `step_s`, in a row.
inline double seconds_per_token(const Block& block, std::uint32_t stage, double step_s) {
  double produced = 0.0, steps = 0.0;
  for (std::uint32_t row = 0; row < block.active_rows(); ++row) {
    const Counters& counters = block.priv(stage, row).counters;
    produced += static_cast<double>(load_relaxed(&counters.produced));
    steps += static_cast<double>(load_relaxed(&counters.steps));
  }
  return produced > 0.0 && steps <= produced ? step_s * steps / produced : step_s;
}

// What the target does next.
struct Choice {
  std::uint32_t max_draft_tokens;  // verify up to so many; 0: decode one token
  std::uint32_t awaited;           // first wait for so many more draft tokens; 0: act now
  double wait_s;                   // expected duration of that wait
};

// The draft tokens of one row: chances[j] that draft token j is kept if those before it are.
struct Outlook {
  std::vector<double> chances;
  bool may_grow = false;  // more draft tokens may come
};

// Chooses what gains most: the expected tokens of a plan, less what its seconds are worth at the
// present rate. A plan verifies the first k draft tokens, or waits for n more first, or decodes m
// tokens first, each of which confirms or corrects a draft token. A plan ends where a correction
// leaves the target without draft tokens. Draft tokens that are still to come have the mean chance.
class GainPolicy {
 public:
  StepCosts& costs() { return costs_; }

  // A generation begins: the time since the last step was not spent on its tokens.
  void begin() {
    noted_at_ = kNever;
    choices_ = 0;
  }

  // After a step of the target with so many columns that took `took` seconds and ended at `now`.
  void note_step(const Block& block, std::uint32_t columns, double took, double now) {
    costs_.note(columns, took);
    double tokens = 0.0;
    for (std::uint32_t row = 0; row < block.active_rows(); ++row)
      tokens += Sequence(block, block.target(), row).word().length;
    if (now > noted_at_) {
      constexpr double keep = 1.0 - 1.0 / 128;
      tokens_ = keep * tokens_ + tokens - noted_;
      seconds_ = keep * seconds_ + now - noted_at_;
    }
    noted_ = tokens;
    noted_at_ = now;
  }

  // Tokens per second of all `rows` together.
  double rate(std::size_t rows) const {
    if (seconds_ > 0.0 && tokens_ > 0.0) return tokens_ / seconds_;
    return costs_.is_known() ? double(rows) / costs_.of(1) : 0.0;
  }

  // The chance of a draft token to be kept at which the next one, of the mean chance, just pays for
  // its column in the verification, and for the `draft_s` that the target stands still for it.
  double least_chance(double draft_s, double mean, std::size_t rows) const {
    const double cost = rate(rows) / double(std::max<std::size_t>(rows, 1));
    return std::clamp(cost * (costs_.column() + draft_s) / std::max(mean, 1e-3), 0.0, 0.9);
  }

  // `most`: most draft tokens of a verification. `arrival_s`: seconds per draft token to come; 0:
  // not known. `mean`: see mean_chance().
  Choice choose(const std::vector<Outlook>& rows, std::uint32_t most, double arrival_s, double mean,
                bool may_wait) {
    std::uint32_t longest = 0;
    for (const Outlook& row : rows) {
      longest = std::max(longest, static_cast<std::uint32_t>(row.chances.size()));
      may_wait = may_wait && row.may_grow;
    }
    const Choice all = {most, 0, 0.0};
    if (rows.empty() || !costs_.is_known()) return all;
    const bool grows = may_grow(rows) && arrival_s > 0.0;
    double price = rate(rows.size()) / double(rows.size());
    if (grows) {
      constexpr std::uint32_t kAgain = 32;  // choices: neither times nor chances change much
      if (choices_++ % kAgain == 0) least_rate_ = rate_without_confidence(most, arrival_s, mean);
      price = std::max(price, least_rate_);
    }
    prepare(most, mean, price);

    Choice best = {0, 0, 0.0};
    double most_gain = -std::numeric_limits<double>::infinity();
    const auto consider = [&](double gain, const Choice& choice) {
      if (gain > most_gain) {
        most_gain = gain;
        best = choice;
      }
    };
    for (std::uint32_t k = 0; k <= std::min(longest, most); ++k)
      consider(verification(rows, k, 0, 0, grows ? arrival_s : 0.0, mean, price), {k, 0, 0.0});
    if (grows) {
      for (std::uint32_t n = 1; may_wait && longest + n <= most; ++n)
        consider(verification(rows, longest + n, n, 0, arrival_s, mean, price),
                 {most, n, n * arrival_s});
      // As many tokens as can be decoded before the draft is out of sight.
      for (std::uint32_t m = 1; m <= most; ++m)
        consider(verification(rows, most, 0, m, arrival_s, mean, price), {0, 0, 0.0});
    }
    if (best.awaited == 0 && longest > 0) {
      // What a verification costs is only known from verifications.
      constexpr std::uint32_t kLongWithout = 32;
      without_ = best.max_draft_tokens == 0 ? without_ + 1 : 0;
      if (without_ >= kLongWithout) {
        without_ = 0;
        return all;
      }
    }
    return best;
  }

 private:
  static bool may_grow(const std::vector<Outlook>& rows) {
    for (const Outlook& row : rows)
      if (row.may_grow) return true;
    return false;
  }

  // The rate at which the best plan gains nothing, if each draft token has the mean chance: what
  // the target reaches at least. At a lower price a plan that takes too long would seem worth it.
  double rate_without_confidence(std::uint32_t most, double arrival_s, double mean) {
    const double single_s = costs_.of(1);
    double low = 0.0, high = double(most + 1) / std::min(single_s, costs_.of(most + 1));
    for (int i = 0; i < 24; ++i) {
      const double price = (low + high) / 2;
      prepare(most, mean, price);
      double best = 1.0 - price * single_s, run = 1.0, chance = 1.0;
      const auto verified = [&](double k, double kept) {  // k draft tokens, none of them left
        const auto n = static_cast<std::uint32_t>(k);
        const double seconds = costs_.of(1 + n);
        return runs_[n] - price * seconds + later(seconds / arrival_s - 1.0) * kept * mean;
      };
      for (std::uint32_t n = 1; n <= most; ++n) {
        chance *= mean;
        best = std::max(best, verified(n, chance) - price * n * arrival_s);
      }
      run = 0.0, chance = 1.0;
      for (std::uint32_t m = 1; m <= most; ++m) {
        run += chance * (1.0 - price * single_s);
        chance *= mean;
        const double made = std::clamp(m * (single_s / arrival_s - 1.0), 0.0, double(most));
        best = std::max(best, run + chance * verified(made, std::pow(mean, made)));
      }
      (best > 0.0 ? low : high) = price;
    }
    return low;
  }

  // later_[b]: the gain of b draft tokens at hand, beyond that of none. runs_[b]: the tokens of
  // their verification.
  void prepare(std::uint32_t most, double mean, double price) {
    price_ = price;
    later_.assign(most + 1, 0.0);
    runs_.assign(most + 1, 1.0);
    double chance = 1.0;
    for (std::uint32_t k = 1; k <= most; ++k) {
      chance *= mean;
      runs_[k] = runs_[k - 1] + chance;
      later_[k] = std::max(later_[k - 1], runs_[k] - price * costs_.of(1 + k));
    }
  }
  double later(double draft_tokens) const {
    if (draft_tokens <= 0.0) return 0.0;
    return later_[static_cast<std::size_t>(std::min(draft_tokens, double(later_.size() - 1)))];
  }

  // The gain of so many draft tokens at hand, of which the first one is `first`.
  template <typename Chance>
  double later(double draft_tokens, std::uint32_t first, const Chance& chance) const {
    if (draft_tokens <= 0.0) return 0.0;
    const auto most = static_cast<std::uint32_t>(std::min(draft_tokens, double(later_.size() - 1)));
    double run = 1.0, kept = 1.0;
    for (std::uint32_t j = 0; j < most; ++j) {
      kept *= chance(first + j);
      run += kept;
    }
    return std::max(run - price_ * costs_.of(1 + most), 0.0);
  }

  // The gain of verifying k draft tokens, after waiting for n or decoding m.
  double verification(const std::vector<Outlook>& rows, std::uint32_t k, std::uint32_t n,
                      std::uint32_t m, double arrival_s, double mean, double price) const {
    const double single_s = costs_.of(1);
    // A draft may write any time of its steps.
    const double made = arrival_s > 0.0 ? std::min(m * single_s / arrival_s, kMany) : n;
    double gain = 0.0;
    for (const Outlook& row : rows) {
      const auto known = static_cast<std::uint32_t>(row.chances.size());
      const auto chance = [&](std::uint32_t j) { return j < known ? row.chances[j] : mean; };
      double alive = 1.0;  // that no token decoded so far was a correction
      for (std::uint32_t i = 0; i < m; ++i) {
        gain += alive * (1.0 - price * single_s);
        alive *= chance(i);
      }
      const double at_hand = m == 0 ? known + n : std::max(0.0, known + made - m);
      const auto verified = std::min(k, static_cast<std::uint32_t>(at_hand));
      const double seconds = costs_.of(1 + verified);
      double run = 1.0, kept = 1.0;
      for (std::uint32_t j = 0; j < verified; ++j) {
        kept *= chance(m + j);
        run += kept;
      }
      const double meanwhile = arrival_s > 0.0 ? seconds / arrival_s : 0.0;
      const double then = kept * chance(m + verified) *
                          later(at_hand - verified - 1.0 + meanwhile, m + verified + 1, chance);
      gain += alive * (run - price * (seconds + n * arrival_s) + then);
    }
    return gain;
  }

  StepCosts costs_;
  static constexpr double kMany = 1e6;  // draft tokens
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  double noted_ = 0.0, noted_at_ = kNever;  // tokens of the target after its last step, and its end
  double tokens_ = 0.0, seconds_ = 0.0;     // of the last steps: older ones fade
  std::uint32_t without_ = 0;  // decoded tokens since a verification, with draft tokens at hand
  std::uint32_t choices_ = 0;
  double price_ = 0.0;       // tokens that a second is worth, in later_
  double least_rate_ = 0.0;  // see rate_without_confidence()
  std::vector<double> later_, runs_;
};

// Sets where each draft stops. `step_s[s]`: seconds of a step of draft s for which the target
// stands still; 0 for a draft that works beside it.
inline void direct_drafts(const Block& block, const GainPolicy& policy,
                          const std::vector<double>& step_s) {
  for (std::uint32_t s = 0; s < block.target(); ++s) {
    const double mean = mean_chance(block.calibration(s + 1));
    const double least =
        policy.least_chance(seconds_per_token(block, s, step_s.at(s)), mean, block.active_rows());
    store_relaxed(&block.control(s).least_chance, static_cast<std::uint32_t>(least * 0x1p16));
  }
}

}  // namespace pipespec
