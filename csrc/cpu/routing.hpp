// Which experts a column is given to, and with what weights.
#pragma once

#include <cstdint>
#include <vector>

namespace pipespec::cpu {

// What the logits of a router become: shares of a softmax, sigmoids, or the two shares of
// SparseMixer (arXiv 2409.12136), which sees the near ones of each maximum only.
enum class Scores : int { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

struct Routing {
  int64_t experts = 0, chosen = 0;  // in all, and of each column
  Scores scores = Scores::kSoftmax;
  bool is_normalised = false;  // the weights of a column's experts sum to `factor`
  // Experts are chosen in the best groups alone: those whose best `group_best` scores have the
  // largest sums.
  int64_t groups = 1, chosen_groups = 1, group_best = 1;
  float factor = 1.0f;
  float jitter = 0.0f;  // of SparseMixer
};

// The experts of a column in ascending order, and their weights, of `logits`. `bias`, if there is
// one, counts in the choice and not in the weights. Of equal scores the lower number wins.
void route(const Routing& routing, const float* logits, const float* bias, int32_t* experts,
           float* weights);

// Columns by expert. A place is a pair of column and expert; the places of an expert follow one
// another, in the order of the columns.
struct Grouping {
  std::vector<int32_t> active;  // experts with columns, ascending
  std::vector<int64_t> begins;  // first place of each, and the number of places
  std::vector<int32_t> column;  // of each place
  std::vector<int32_t> place;   // of the experts of each column: [columns, each]

  // `chosen`: [columns, each], experts below `experts`.
  void assign(const std::vector<int32_t>& chosen, int64_t columns, int64_t experts);
};

}  // namespace pipespec::cpu
