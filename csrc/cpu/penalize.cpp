#include "penalize.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace pipespec::cpu {
namespace {

// The different tokens that a column has seen, with the number of their generated occurrences.
class Seen {
 public:
  explicit Seen(int64_t vocab) : vocab_(vocab) {
    if (int64_t(table_.size()) < vocab) table_.resize(size_t(vocab), 0);
    ids_.clear();
  }
  ~Seen() {
    for (const int32_t id : ids_) table_[size_t(id)] = 0;
  }
  Seen(const Seen&) = delete;
  Seen& operator=(const Seen&) = delete;

  void add(int64_t id, bool generated) {
    if (id < 0 || id >= vocab_) return;
    int32_t& entry = table_[size_t(id)];
    if (entry == 0) {
      ids_.push_back(int32_t(id));
      entry = 1;
    }
    entry += generated;
  }

  template <typename Function>
  void each(const Function& function) const {
    for (const int32_t id : ids_) function(id, table_[size_t(id)] - 1);
  }

 private:
  static thread_local std::vector<int32_t> table_;  // 0: not seen, else 1 + occurrences
  static thread_local std::vector<int32_t> ids_;
  int64_t vocab_;
};

thread_local std::vector<int32_t> Seen::table_;
thread_local std::vector<int32_t> Seen::ids_;

void apply(const PenaltyTask& task, int64_t row, int64_t column, const Seen& seen) {
  float* const x = task.logits + row * task.batch_stride + column * task.width_stride;
  for (int64_t i = row * task.num_biases; i < (row + 1) * task.num_biases; ++i) {
    const int64_t id = task.bias_ids[i];
    if (id >= 0 && id < task.vocab) x[id] += task.bias[i];
  }
  const float repetition = task.repetition[row], presence = task.presence[row],
              frequency = task.frequency[row];
  seen.each([&](int32_t id, int32_t occurrences) {
    float value = x[id] < 0 ? x[id] * repetition : x[id] / repetition;
    if (occurrences > 0) {
      value -= frequency * float(occurrences);
      value -= presence;
    }
    x[id] = value;
  });
  if (task.bitmask == nullptr) return;
  const int64_t words = (task.vocab + 31) / 32;
  const uint32_t* const mask = task.bitmask + (row * task.width + column) * words;
  for (int64_t word = 0; word < words; ++word) {
    if (mask[word] == ~uint32_t{0}) continue;
    const int64_t begin = 32 * word, end = std::min(begin + 32, task.vocab);
    for (int64_t id = begin; id < end; ++id) {
      if ((mask[word] >> (id - begin) & 1) == 0) x[id] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

void penalize(const PenaltyTask& task) {
  for (int64_t row = 0; row < task.batch; ++row) {
    const int64_t length = task.lengths[row], prompt = task.prompt_lengths[row];
    int32_t* const history = task.history + row * task.capacity;
    const int64_t fed = task.query_lens == nullptr ? task.width : task.query_lens[row];
    if (fed > 0) {
      const int64_t first =
          task.num_draft_tokens == nullptr ? 0 : fed - 1 - task.num_draft_tokens[row];
      Seen seen(task.vocab);
      for (int64_t i = 0; i < length; ++i) seen.add(history[i], i >= prompt);
      for (int64_t column = 0; column < fed; ++column) {
        seen.add(task.tokens.at(row, column), length + column >= prompt);
        if (column >= first) apply(task, row, column, seen);
      }
    }
    const int64_t room = std::min(task.width, task.capacity - length);
    for (int64_t column = 0; column < room; ++column) {
      history[length + column] = int32_t(task.tokens.at(row, column));
    }
  }
}

}  // namespace pipespec::cpu
