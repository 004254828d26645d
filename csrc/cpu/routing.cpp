#include "routing.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace pipespec::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The numbers of the `count` largest of `values`, the lower number first among equal ones.
void largest(const float* values, int64_t n, int64_t count, std::vector<int32_t>& found) {
  found.resize(size_t(n));
  std::iota(found.begin(), found.end(), 0);
  std::partial_sort(found.begin(), found.begin() + count, found.end(), [=](int32_t a, int32_t b) {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  });
  found.resize(size_t(count));
}

// Scores outside of the best groups become the lowest of all.
void keep_groups(const Routing& r, std::vector<float>& scores) {
  const int64_t size = r.experts / r.groups;
  std::vector<float> sums(size_t(r.groups), 0.0f);
  std::vector<int32_t> best;
  for (int64_t g = 0; g < r.groups; ++g) {
    largest(scores.data() + g * size, size, r.group_best, best);
    for (const int32_t i : best) sums[size_t(g)] += scores[size_t(g * size + i)];
  }
  largest(sums.data(), r.groups, r.chosen_groups, best);
  for (int64_t g = 0; g < r.groups; ++g) {
    if (std::find(best.begin(), best.end(), int32_t(g)) == best.end())
      std::fill_n(scores.begin() + g * size, size, kLowest);
  }
}

// The expert of the largest of `masked`, and its share among those near it. `logits`: of all.
float mix_sparsely(const float* logits, const std::vector<float>& masked, float jitter,
                   int32_t& expert) {
  const auto top = std::max_element(masked.begin(), masked.end());
  expert = int32_t(top - masked.begin());
  float sum = 0.0f;
  for (size_t i = 0; i < masked.size(); ++i) {
    const float scale = std::max(std::fabs(logits[i]), *top);
    if (!((*top - masked[i]) / scale > 2 * jitter)) sum += std::exp(masked[i] - *top);
  }
  return 1.0f / sum;
}

}  // namespace

void route(const Routing& r, const float* logits, const float* bias, int32_t* experts,
           float* weights) {
  thread_local std::vector<float> scores, choice;
  thread_local std::vector<int32_t> found;
  scores.assign(logits, logits + r.experts);
  if (r.scores == Scores::kSparseMixer) {
    found.resize(2);
    float shares[2];
    shares[0] = mix_sparsely(logits, scores, r.jitter, found[0]);
    scores[size_t(found[0])] = kLowest;
    shares[1] = mix_sparsely(logits, scores, r.jitter, found[1]);
    const bool swaps = found[1] < found[0];
    for (int i = 0; i < 2; ++i) experts[i] = found[i ^ swaps], weights[i] = shares[i ^ swaps];
    return;
  }
  if (r.scores == Scores::kSoftmax) {
    const float top = *std::max_element(scores.begin(), scores.end());
    float sum = 0.0f;
    for (float& s : scores) sum += s = std::exp(s - top);
    for (float& s : scores) s /= sum;
  } else {
    for (float& s : scores) s = 1.0f / (1.0f + std::exp(-s));
  }
  choice = scores;
  for (int64_t i = 0; bias != nullptr && i < r.experts; ++i) choice[size_t(i)] += bias[i];
  if (r.chosen_groups < r.groups) keep_groups(r, choice);
  largest(choice.data(), r.experts, r.chosen, found);
  std::sort(found.begin(), found.end());
  float sum = 0.0f;
  for (const int32_t e : found) sum += scores[size_t(e)];
  const float scale = r.is_normalised ? r.factor / (sum + 1e-20f) : r.factor;
  for (size_t i = 0; i < found.size(); ++i) {
    experts[i] = found[i];
    weights[i] = scores[size_t(found[i])] * scale;
  }
}

void Grouping::assign(const std::vector<int32_t>& chosen, int64_t columns, int64_t experts) {
  const int64_t each = columns == 0 ? 0 : int64_t(chosen.size()) / columns;
  std::vector<int64_t> next(size_t(experts) + 1, 0);
  for (const int32_t e : chosen) ++next[size_t(e) + 1];
  active.clear();
  begins.clear();
  for (int64_t e = 0; e < experts; ++e) {
    if (next[size_t(e) + 1] > 0) {
      active.push_back(int32_t(e));
      begins.push_back(next[size_t(e)]);
    }
    next[size_t(e) + 1] += next[size_t(e)];
  }
  begins.push_back(int64_t(chosen.size()));
  column.resize(chosen.size());
  place.resize(chosen.size());
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int64_t at = next[size_t(chosen[i])]++;
    column[size_t(at)] = int32_t(int64_t(i) / each);
    place[i] = int32_t(at);
  }
}

}  // namespace pipespec::cpu
