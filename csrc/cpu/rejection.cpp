#include "rejection.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "../protocol/philox.hpp"
#include "kernels.hpp"
#include "number.hpp"
#include "pool.hpp"

// How one pass over a row gives the decision of a computation in double. The pass adds up powers in
// fp32 with a bound of their error (rejection_span.hpp). The test is decided unless the error
// intervals of its two sides overlap, which is rare. The draw from the residual works in the same
// way: few ids can win, and their scores are computed in double, as intervals that include the
// error of the sums. Only a case that is still undecided is computed again with exact sums.

namespace pipespec::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;
// Below this logarithm a probability is near the smallest double, where the definition rounds
// differently.
constexpr double kTiny = -600;
// A larger error decides nothing, and its bound would need terms of higher order.
constexpr double kLargestError = 0.25;

// A round of less than this stays in the caller: it ends before a helper has woken up (select.cpp).
constexpr int64_t kParallelBytes = 128 << 10;
constexpr int64_t kMinPart = 8 << 10;  // ids; a part restarts the search for the best
constexpr int64_t kPartsPerThread = 4;

// One row of logits, as it is scaled and cut.
struct Row {
  const void* data;
  DType dtype;
  float scale, cutoff;

  double score(int64_t i) const {
    float x;
    if (dtype == DType::kFloat32) {
      std::memcpy(&x, static_cast<const float*>(data) + i, sizeof(x));
    } else {
      uint16_t half;
      std::memcpy(&half, static_cast<const uint16_t*>(data) + i, sizeof(half));
      x = dtype == DType::kBFloat16 ? float_of_bfloat16(half) : float_of_float16(half);
    }
    return x < cutoff ? -kInf : double(x) * double(scale);
  }
};

// exp(score - shift) / sum, with a bound of the error of its logarithm that all ids share.
struct Distribution {
  double shift = 0, sum = kNan;
  double error = 0;

  bool known() const { return sum == sum; }
  double p(double score) const { return std::exp(score - shift) / sum; }
  double log_p(double score) const { return score - shift - std::log(sum); }
};

// By definition, in double. A result that is not known() means that there is no distribution.
Distribution softmax(const Row& row, int64_t vocab) {
  double top = -kInf;
  for (int64_t i = 0; i < vocab; ++i) {
    const double score = row.score(i);
    if (score != score) return {};
    top = std::max(top, score);
  }
  if (!std::isfinite(top)) return {};
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(row.score(i) - top);
  return {top, sum, 0};
}

Distribution estimate(const Weight* parts, int64_t n) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) {
    if (parts[i].sum > 0) top = std::max(top, parts[i].reference);
  }
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    // Also if it is NaN.
    if (parts[i].sum != 0)
      sum += parts[i].sum * std::exp2(double(parts[i].reference) - double(top));
  }
  if (!(sum > 0)) return {};
  const double reference = double(top) * kLn2;
  const double error = kWeightError + kWeightErrorPerUnit * std::fabs(reference);
  if (error > kLargestError) return {};
  return {reference + std::log(sum), 1, error};
}

// What becomes the last token of a row of the batch.
struct Draw {
  int64_t batch_row, at;  // selected[batch_row, at]
  uint64_t position;
  Row target, draft;
  bool residual;      // from max(p - q, 0), else from the target's scores
  int64_t excluded;   // id that scores leave out; -1: none
  Distribution p, q;  // of the residual
  double start;       // a guess: the best is most likely above; -inf: no guess

  bool exact() const { return p.error + q.error == 0; }
};

// The best id of a part of a row, with bounds of its score and of the others'.
struct Contest : Visitor {
  const Draw* draw;
  int64_t winner = -1;
  double best;            // lower bound of the winner's score
  double most = -kInf;    // upper bound of the winner's score
  double others = -kInf;  // upper bound of all other scores
  double offset = 0;      // of scores above the logarithm of p
  double least_gap = 0, low = 1, high = 1;

  explicit Contest(const Draw& of) : draw(&of), best(of.residual ? of.start : -kInf) {
    visit = of.residual ? &Contest::visit_residual : &Contest::visit_score;
    if (of.residual) {
      const double error = of.p.error + of.q.error;
      offset = of.p.shift + std::log(of.p.sum);
      const double draft_offset = of.q.shift + std::log(of.q.sum);
      // Where the scores differ by less, p is less than q. The last terms are for roundings.
      least_gap = offset - draft_offset - error - 1e-6 -
                  (std::fabs(offset) + std::fabs(draft_offset)) * 0x1p-50;
      low = std::exp(-error);
      high = std::exp(error);
    }
    raise();
  }

  static bool visit_score(Visitor* self, int64_t id, float noise) {
    Contest& c = *static_cast<Contest*>(self);
    if (id == c.draw->excluded) return false;
    const double y = c.draw->target.score(id) + double(noise);
    if (y <= c.best) return false;
    c.best = y;
    c.winner = id;
    c.raise();
    return y != y;
  }

  static bool visit_residual(Visitor* self, int64_t id, float noise) {
    Contest& c = *static_cast<Contest*>(self);
    const Draw& d = *c.draw;
    const double target = d.target.score(id), draft = d.draft.score(id);
    if (target - draft <= c.least_gap) return false;
    const double p = d.p.p(target), q = d.q.p(draft);
    const double largest = p - q * c.low, smallest = p - q * c.high;
    if (!(largest > 0)) return false;
    const double most = std::log(largest) + double(noise);
    const double least = smallest > 0 ? std::log(smallest) + double(noise) : -kInf;
    if (least > c.best) {
      c.others = std::max(c.others, c.most);
      c.best = least;
      c.most = most;
      c.winner = id;
      c.raise();
    } else {
      c.others = std::max(c.others, most);
    }
    return false;
  }

  // Adds the result of a later part of the row.
  void merge(const Contest& later) {
    others = std::max(others, later.others);
    if (later.winner >= 0 && best == best && !(later.best <= best)) {
      others = std::max(others, most);
      best = later.best;
      most = later.most;
      winner = later.winner;
    } else {
      others = std::max(others, later.most);
    }
  }

  // Whether the estimates of the residual decide the draw.
  bool decided() const { return winner >= 0 && best > others && best > kTiny; }

 private:
  // In fp32 product and sum round by 2^-24 each, of numbers that are not much larger than the bar
  // where they come near it.
  void raise() {
    double y = best + offset;
    if (y < kInf) y -= (std::fabs(y) + 64) * 0x1p-21;
    bar = y < -double(kLargest)              ? float(kNan)
          : y > double(kLargest) && y < kInf ? kLargest
                                             : float(y);
  }
};

class Job {
 public:
  Job(const Logits& logits, const Tokens& tokens, const Draft* draft, const Noise& noise,
      uint32_t accept_stream, int threads)
      : logits_(logits),
        tokens_(tokens),
        draft_(draft),
        noise_(noise),
        accept_stream_(accept_stream),
        kernels_(kernels().rejection),
        threads_(threads) {}

  void run(const int32_t* query_lens, const int32_t* num_draft_tokens, int32_t* selected,
           int32_t* accepted) {
    std::vector<Walk> walks;
    for (int64_t r = 0; r < logits_.batch; ++r) {
      if (query_lens[r] > 0)
        walks.push_back({r, query_lens[r] - 1 - num_draft_tokens[r], num_draft_tokens[r]});
    }
    // Each round tests one position of every remaining row, and all draws come at the end, so that
    // the rows share the threads evenly.
    const bool alone = threads_ == 1 || int64_t(walks.size()) * row_bytes() < kParallelBytes;
    Team team(alone ? 0 : threads_ - 1, &Job::unit, this);
    team_ = &team;
    while (!walks.empty()) {
      items_.clear();
      for (Walk& walk : walks) look(walk);
      weigh_all();
      size_t live = 0;
      for (Walk& walk : walks) {
        if (!passes(walk)) continue;
        selected[walk.row * logits_.width + walk.at] = int32_t(walk.draft_token);
        ++walk.at;
        walks[live++] = walk;
      }
      walks.resize(live);
    }
    draw_all();
    for (size_t i = 0; i < draws_.size(); ++i) {
      const Draw& draw = draws_[i];
      selected[draw.batch_row * logits_.width + draw.at] = int32_t(winners_[i]);
      accepted[draw.batch_row] = int32_t(draw.at);
    }
  }

 private:
  // One row of the batch on its way through its draft tokens.
  struct Walk {
    int64_t row;
    int64_t first;  // column whose logits decide about the first draft token
    int64_t draft_tokens;
    int64_t at = 0;            // draft tokens accepted so far
    int64_t draft_token = -1;  // under test; -1: not an id of the vocabulary
    int64_t item = -1;         // index of its rows of logits in items_; -1: it needs no sums

    int64_t column() const { return first + at; }
    bool ended() const { return at == draft_tokens; }
  };

  int64_t row_bytes() const { return logits_.vocab * item_bytes(logits_.dtype); }

  static Row row_of(const Logits& logits, const float* scale, const float* cutoff,
                    const Walk& walk) {
    const int64_t q = walk.column();
    const int64_t at = walk.row * logits.batch_stride + q * logits.width_stride;
    return {static_cast<const unsigned char*>(logits.data) + at * item_bytes(logits.dtype),
            logits.dtype, scale[walk.row],
            cutoff == nullptr ? float(-kInf) : cutoff[walk.row * logits.width + q]};
  }
  Row target_row(const Walk& walk) const {
    return row_of(logits_, noise_.inv_temperature, noise_.cutoff, walk);
  }
  Row draft_row(const Walk& walk) const {
    return row_of(draft_->logits, draft_->inv_temperature, draft_->cutoff, walk);
  }

  // Notes the rows of logits that a walk's next step needs.
  void look(Walk& walk) {
    walk.item = -1;
    if (walk.ended()) return;
    const int64_t token = tokens_.at(walk.row, walk.column() + 1);
    walk.draft_token = token >= 0 && token < logits_.vocab ? token : -1;
    if (draft_ == nullptr && walk.draft_token < 0) return;
    walk.item = int64_t(items_.size());
    items_.push_back(target_row(walk));
    if (draft_ != nullptr) items_.push_back(draft_row(walk));
  }

  // True: the draft token is accepted. False: the walk ends, and its draw is noted.
  bool passes(const Walk& walk) {
    Draw draw{};
    draw.batch_row = walk.row;
    draw.at = walk.at;
    draw.position = uint64_t(noise_.positions[walk.row]) + uint64_t(walk.column());
    draw.target = target_row(walk);
    draw.excluded = -1;
    draw.start = -kInf;
    if (walk.item >= 0) {
      if (draft_ != nullptr) draw.draft = draft_row(walk);
      const Verdict verdict = test(walk, draw);
      if (verdict == Verdict::kAccepted) return true;
      if (verdict == Verdict::kRejected) {
        // Without a draft the residual is p without the draft token.
        draw.residual = draft_ != nullptr;
        draw.excluded = walk.draft_token;
      }
    }
    draws_.push_back(draw);
    return false;
  }

  enum class Verdict { kAccepted, kRejected, kNoDistribution };

  Verdict test(const Walk& walk, Draw& draw) const {
    const uint64_t seed = noise_.seeds[walk.row];
    const double u = (double(philox::draw(seed, draw.position, accept_stream_, 0)) + 0.5) * 0x1p-32;
    const bool certain = draft_ == nullptr;
    const double of_target = walk.draft_token < 0 ? -kInf : draw.target.score(walk.draft_token);
    const double of_draft =
        certain || walk.draft_token < 0 ? 0 : draw.draft.score(walk.draft_token);
    draw.p = estimated(walk.item);
    draw.q = certain ? Distribution{0, 1, 0} : estimated(walk.item + 1);
    if (draw.p.known() && draw.q.known()) {
      if (walk.draft_token < 0) return Verdict::kRejected;
      const double log_p = draw.p.log_p(of_target), log_q = draw.q.log_p(of_draft);
      const double excess = std::log(u) + log_q - log_p;
      const double error = draw.p.error + draw.q.error + std::fabs(log_p) * 0x1p-40;
      if (excess < -error && log_p > kTiny) return Verdict::kAccepted;
      if (of_target == -kInf || excess > error) {
        // The residual has a total of at least q(h) - p(h). Its best score is above `start`, except
        // with probability exp(-12).
        const double left = std::exp(log_q) - std::exp(log_p);
        if (left > 0) draw.start = std::log(left / 12);
        return Verdict::kRejected;
      }
    }
    make_exact(draw, certain);
    if (!draw.p.known() || !draw.q.known()) return Verdict::kNoDistribution;
    const double p = draw.p.p(of_target), q = draw.q.p(of_draft);
    return walk.draft_token >= 0 && u * q < p ? Verdict::kAccepted : Verdict::kRejected;
  }

  void make_exact(Draw& draw, bool certain) const {
    draw.p = softmax(draw.target, logits_.vocab);
    if (!certain) draw.q = softmax(draw.draft, logits_.vocab);
  }

  // --- rows in parts, by all threads ---

  static void unit(void* self, int64_t i) {
    Job& job = *static_cast<Job*>(self);
    job.drawing_ ? job.draw(job.first_ + i) : job.weigh(job.first_ + i);
  }

  void cut(int64_t rows) {
    const int64_t ids = std::max(kMinPart, rows * logits_.vocab / (threads_ * kPartsPerThread));
    parts_ = threads_ == 1 ? 1 : std::max<int64_t>(1, (logits_.vocab + ids / 2) / ids);
    // Parts begin a whole number of cache lines apart.
    part_ = ((logits_.vocab + parts_ - 1) / parts_ + 63) / 64 * 64;
    parts_ = (logits_.vocab + part_ - 1) / part_;
  }

  void run_units(int64_t n, int64_t rows) {
    if (rows * row_bytes() < kParallelBytes) {
      first_ = 0;
      for (int64_t i = 0; i < n; ++i) unit(this, i);
      return;
    }
    for (first_ = 0; first_ < n; first_ += Team::kMaxUnits)
      team_->run(std::min(n - first_, Team::kMaxUnits));
  }

  const RejectionKernels::OfFormat& of(const Row& row) const {
    return row.dtype == DType::kFloat32    ? kernels_.float32
           : row.dtype == DType::kBFloat16 ? kernels_.bfloat16
                                           : kernels_.float16;
  }

  void weigh_all() {
    const int64_t rows = int64_t(items_.size());
    cut(rows);
    weights_.resize(size_t(rows * parts_));
    run_units(rows * parts_, rows);
  }

  void weigh(int64_t i) {
    const Row& row = items_[size_t(i / parts_)];
    const int64_t begin = i % parts_ * part_;
    weights_[size_t(i)] = of(row).weigh(row.data, begin, std::min(part_, logits_.vocab - begin),
                                        float(double(row.scale) * kLog2E), row.cutoff);
  }

  Distribution estimated(int64_t item) const {
    return estimate(&weights_[size_t(item * parts_)], parts_);
  }

  void draw_all() {
    drawing_ = true;
    const int64_t rows = int64_t(draws_.size());
    cut(rows);
    contests_.clear();
    for (const Draw& draw : draws_) {
      for (int64_t part = 0; part < parts_; ++part) contests_.emplace_back(draw);
    }
    run_units(rows * parts_, rows);
    for (int64_t i = 0; i < rows; ++i) {
      Contest& all = contests_[size_t(i * parts_)];
      for (int64_t part = 1; part < parts_; ++part) all.merge(contests_[size_t(i * parts_ + part)]);
      winners_.push_back(winner(draws_[size_t(i)], all));
    }
  }

  void draw(int64_t i) {
    const int64_t begin = i % parts_ * part_;
    scan(draws_[size_t(i / parts_)], begin, std::min(part_, logits_.vocab - begin),
         contests_[size_t(i)]);
  }

  void scan(const Draw& draw, int64_t begin, int64_t n, Contest& contest) const {
    const CoupledRow row{draw.target.data,  noise_.seeds[draw.batch_row],
                         draw.position,     noise_.stream,
                         draw.target.scale, std::fmax(draw.target.cutoff, -kLargest)};
    of(draw.target).scan(row, begin, n, contest);
  }

  int64_t winner(Draw& draw, const Contest& found) const {
    const bool exact = draw.exact();
    if (!draw.residual) return std::max<int64_t>(found.winner, 0);
    if (exact ? found.winner >= 0 : found.decided()) return found.winner;
    if (!exact) {
      draw.start = -kInf;
      make_exact(draw, false);
      const int64_t again = winner_of(draw);
      if (again >= 0) return again;
    }
    // Nothing is left of the residual.
    draw.residual = false;
    draw.excluded = -1;
    return std::max<int64_t>(winner_of(draw), 0);
  }

  int64_t winner_of(const Draw& draw) const {
    Contest contest(draw);
    scan(draw, 0, logits_.vocab, contest);
    return contest.winner;
  }

  const Logits& logits_;
  const Tokens& tokens_;
  const Draft* const draft_;
  const Noise& noise_;
  const uint32_t accept_stream_;
  const RejectionKernels& kernels_;
  const int64_t threads_;
  Team* team_ = nullptr;
  bool drawing_ = false;
  int64_t first_ = 0, parts_ = 1, part_ = 0;
  std::vector<Row> items_;
  std::vector<Weight> weights_;
  std::vector<Draw> draws_;
  std::vector<Contest> contests_;
  std::vector<int64_t> winners_;
};

}  // namespace

void rejection_sample(const Logits& logits, const Tokens& tokens, const int32_t* query_lens,
                      const int32_t* num_draft_tokens, const Draft* draft, const Noise& noise,
                      uint32_t accept_stream, int32_t* selected, int32_t* accepted, int threads) {
  check(logits, threads);
  item_bytes(logits.dtype);
  check(tokens);
  if (draft != nullptr) {
    item_bytes(draft->logits.dtype);
    if (draft->logits.batch != logits.batch || draft->logits.width != logits.width ||
        draft->logits.vocab != logits.vocab)
      throw std::invalid_argument("the draft's logits are not of the target's shape");
  }
  check_counts(logits, query_lens, num_draft_tokens);
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] == 0) continue;
    check_noise(logits, noise, r);
    if (draft != nullptr) check_scale(draft->inv_temperature[r], r, "draft_inv_temperature");
  }
  std::fill_n(selected, logits.batch * logits.width, -1);
  std::fill_n(accepted, logits.batch, 0);
  Job(logits, tokens, draft, noise, accept_stream, threads)
      .run(query_lens, num_draft_tokens, selected, accepted);
}

}  // namespace pipespec::cpu
