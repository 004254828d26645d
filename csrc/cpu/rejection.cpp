#include "rejection.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "../protocol/gumbel.hpp"
#include "../protocol/philox.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Ids of a part. Sums add up part by part, so they do not depend on threads.
constexpr int64_t kPart = 8 << 10;

// The element of a row that may begin at any byte.
template <class T>
T element(const void* row, int64_t i) {
  T x;
  std::memcpy(&x, static_cast<const unsigned char*>(row) + i * int64_t(sizeof(T)), sizeof(T));
  return x;
}

float logit_at(const void* row, DType dtype, int64_t id) {
  if (dtype == DType::kFloat32) return element<float>(row, id);
  const uint16_t half = element<uint16_t>(row, id);
  return dtype == DType::kBFloat16 ? float_of_bfloat16(half) : float_of_float16(half);
}

// One row of logits, as it is scaled and cut.
struct Row {
  const void* data;
  DType dtype;
  float scale, cutoff;

  double score(int64_t i) const {
    const float x = logit_at(data, dtype, i);
    return x < cutoff ? -kInf : double(x) * double(scale);
  }
};

// exp(score - top) / sum; without a sum there is no distribution.
struct Distribution {
  double top = 0, sum = 0;

  bool known() const { return sum > 0; }
  double p(double score) const { return std::exp(score - top) / sum; }
};

// The best id of a part of a row. A NaN is the best of all.
struct Best {
  double y = -kInf;
  int64_t id = -1;

  bool add(double other, int64_t its_id) {
    if (!(other > y || other != other)) return false;
    y = other;
    id = its_id;
    return true;
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
        parts_((logits.vocab + kPart - 1) / kPart),
        team_(parts_ > 1 ? threads - 1 : 0, &Job::unit, this) {}

  // Tests the draft tokens of a row, and returns the number that it accepts.
  int32_t walk(int64_t r, int64_t first, int64_t num_draft_tokens, int32_t* selected) {
    for (int64_t at = 0;; ++at) {
      const int64_t column = first + at;
      const Row target = row_of(logits_, noise_.inv_temperature, noise_.cutoff, r, column);
      Draw draw{r, uint64_t(noise_.positions[r]) + uint64_t(column), target, {}, {}, {}, -1};
      if (at < num_draft_tokens) {
        const int64_t token = tokens_.at(r, column + 1);
        if (passes(draw, column, token >= 0 && token < logits_.vocab ? token : -1)) {
          selected[at] = int32_t(token);
          continue;
        }
      }
      selected[at] = int32_t(winner(draw));
      return int32_t(at);
    }
  }

 private:
  // What becomes the last token of a row.
  struct Draw {
    int64_t row;
    uint64_t position;
    Row target, draft;
    Distribution p, q;  // of the residual max(p - q, 0); q unknown: the target's scores
    int64_t excluded;   // id that the scores leave out; -1: none
  };

  static Row row_of(const Logits& logits, const float* scale, const float* cutoff, int64_t r,
                    int64_t column) {
    const int64_t at = r * logits.batch_stride + column * logits.width_stride;
    return {static_cast<const unsigned char*>(logits.data) + at * item_bytes(logits.dtype),
            logits.dtype, scale[r],
            cutoff == nullptr ? float(-kInf) : cutoff[r * logits.width + column]};
  }

  static void unit(void* self, int64_t part) {
    Job& job = *static_cast<Job*>(self);
    job.work_(part, part * kPart, std::min((part + 1) * kPart, job.logits_.vocab));
  }

  // By all threads: work(part, begin, end) for the ids of each part.
  void each_part(std::function<void(int64_t, int64_t, int64_t)> work) {
    work_ = std::move(work);
    team_.run(parts_);
  }

  Distribution softmax(const Row& row) {
    std::vector<double> of(size_t(parts_), -kInf);
    each_part([&](int64_t part, int64_t begin, int64_t end) {
      double top = -kInf;
      for (int64_t i = begin; i < end; ++i) {
        const double score = row.score(i);
        top = std::max(top, score != score ? kInf : score);  // a NaN is no distribution either
      }
      of[size_t(part)] = top;
    });
    const double top = *std::max_element(of.begin(), of.end());
    if (!std::isfinite(top)) return {};
    each_part([&](int64_t part, int64_t begin, int64_t end) {
      double sum = 0;
      for (int64_t i = begin; i < end; ++i) sum += std::exp(row.score(i) - top);
      of[size_t(part)] = sum;
    });
    double sum = 0;
    for (const double x : of) sum += x;
    return {top, sum};
  }

  // Whether the draft token (-1: not an id) is accepted. Notes what is drawn from if not.
  bool passes(Draw& draw, int64_t column, int64_t token) {
    const bool certain = draft_ == nullptr;
    if (certain && token < 0) return false;
    const Distribution p = softmax(draw.target);
    Distribution q;
    if (!certain) {
      draw.draft =
          row_of(draft_->logits, draft_->inv_temperature, draft_->cutoff, draw.row, column);
      q = softmax(draw.draft);
    }
    if (!p.known() || !(certain || q.known())) return false;
    if (token >= 0) {
      const double u =
          (double(philox::draw(noise_.seeds[draw.row], draw.position, accept_stream_, 0)) + 0.5) *
          0x1p-32;
      const double of_draft = certain ? 1 : q.p(draw.draft.score(token));
      if (u * of_draft < p.p(draw.target.score(token))) return true;
    }
    draw.p = p;
    draw.q = q;
    draw.excluded = certain ? token : -1;  // the residual is p without it
    return false;
  }

  int64_t winner(const Draw& draw) {
    Best best;
    if (draw.q.known()) best = best_of(draw, true);
    if (best.id < 0) best = best_of(draw, false);  // nothing is left of the residual
    return std::max<int64_t>(best.id, 0);
  }

  Best best_of(const Draw& draw, bool residual) {
    std::vector<Best> found(static_cast<size_t>(parts_));
    each_part([&](int64_t part, int64_t begin, int64_t end) {
      found[size_t(part)] =
          residual ? residual_best(draw, begin, end) : score_best(draw, begin, end);
    });
    Best best;
    for (const Best& other : found) {
      if (best.y != best.y) break;
      best.add(other.y, other.id);
    }
    return best;
  }

  double gumbel(const Draw& draw, int64_t id) const {
    return double(noise::gumbel(
        philox::draw(noise_.seeds[draw.row], draw.position, noise_.stream, uint32_t(id))));
  }

  Best score_best(const Draw& draw, int64_t begin, int64_t end) const {
    Best best;
    for (int64_t i = begin; i < end; ++i) {
      const double score = draw.target.score(i);
      if (score + double(noise::kCeiling) <= best.y || i == draw.excluded) continue;
      if (best.add(score + gumbel(draw, i), i) && best.y != best.y) break;
    }
    return best;
  }

  Best residual_best(const Draw& draw, int64_t begin, int64_t end) const {
    Best best;
    double smallest = 0;  // no noise lets a smaller residual win
    for (int64_t i = begin; i < end; ++i) {
      const double left = draw.p.p(draw.target.score(i)) - draw.q.p(draw.draft.score(i));
      if (left > smallest && best.add(std::log(left) + gumbel(draw, i), i))
        smallest = std::exp(best.y - double(noise::kCeiling));
    }
    return best;
  }

  const Logits& logits_;
  const Tokens& tokens_;
  const Draft* const draft_;
  const Noise& noise_;
  const uint32_t accept_stream_;
  const int64_t parts_;
  std::function<void(int64_t, int64_t, int64_t)> work_;
  Team team_;
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
  Job job(logits, tokens, draft, noise, accept_stream, threads);
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (query_lens[r] == 0) continue;
    accepted[r] = job.walk(r, query_lens[r] - 1 - num_draft_tokens[r], num_draft_tokens[r],
                           selected + r * logits.width);
  }
}

}  // namespace pipespec::cpu
