#include "logprobs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// Less than this stays in the caller: it ends before a helper has woken up (select.cpp).
constexpr int64_t kParallelBytes = 128 << 10;
constexpr int64_t kMinPart = 8 << 10;  // ids
constexpr int64_t kPartsPerThread = 4;

struct Candidate {
  float logit;
  int32_t id;

  bool before(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

bool before(const Candidate& a, const Candidate& b) { return a.before(b); }

// The largest logits of a part of a row, as a heap whose front is the last of them.
struct Best : Leaders {
  std::vector<Candidate> heap;
  size_t most = 0;

  // Reserves all memory: what a helper thread throws ends the process.
  void begin(int64_t top_n, int64_t ids) {
    visit = &Best::take;
    bar = -float(kInf);
    most = size_t(top_n);
    heap.reserve(size_t(std::min(top_n, ids)));
  }

  static void take(Leaders* self, int64_t id, float logit) {
    Best& best = *static_cast<Best*>(self);
    std::vector<Candidate>& heap = best.heap;
    if (heap.size() == best.most) {
      std::pop_heap(heap.begin(), heap.end(), before);
      heap.pop_back();
    }
    heap.push_back({logit, int32_t(id)});
    std::push_heap(heap.begin(), heap.end(), before);
    if (heap.size() == best.most) best.bar = heap.front().logit;
  }
};

// A row of logits that selected a token.
struct Row {
  const void* data;
  int64_t at;  // of [B, Q]
  float scale, cutoff;
};

class Job {
 public:
  Job(const LogprobTask& task, int threads) : task_(task), threads_(threads) {
    const LogprobKernels& kernels = cpu::kernels().logprobs;
    const DType dtype = task.logits.dtype;
    kernel_ = dtype == DType::kFloat32    ? kernels.float32
              : dtype == DType::kBFloat16 ? kernels.bfloat16
                                          : kernels.float16;
  }

  void run() {
    find_rows();
    const int64_t rows = int64_t(rows_.size()), vocab = task_.logits.vocab;
    const int64_t bytes = rows * vocab * item_bytes(task_.logits.dtype);
    const bool alone = threads_ == 1 || bytes < kParallelBytes;
    const int64_t ids = std::max(kMinPart, rows * vocab / (threads_ * kPartsPerThread));
    parts_ = alone ? 1 : std::max<int64_t>(1, (vocab + ids / 2) / ids);
    // Parts begin a whole number of cache lines apart.
    part_ = ((vocab + parts_ - 1) / parts_ + 63) / 64 * 64;
    parts_ = (vocab + part_ - 1) / part_;
    sums_.resize(size_t(rows * parts_));
    best_.resize(task_.top_n > 0 ? sums_.size() : 0);
    for (Best& best : best_) best.begin(task_.top_n, part_);
    {
      Team team(alone ? 0 : threads_ - 1, &Job::unit, this);
      const int64_t units = rows * parts_;
      for (first_ = 0; first_ < units; first_ += Team::kMaxUnits)
        team.run(std::min(units - first_, Team::kMaxUnits));
    }
    for (int64_t i = 0; i < rows; ++i) write(i);
  }

 private:
  void find_rows() {
    const Logits& logits = task_.logits;
    const int64_t bytes = item_bytes(logits.dtype);
    for (int64_t r = 0; r < logits.batch; ++r) {
      if (task_.query_lens[r] == 0) continue;
      const int64_t first = task_.query_lens[r] - 1 - task_.num_draft_tokens[r];
      const float scale = task_.inv_temperature == nullptr ? 1.0f : task_.inv_temperature[r];
      for (int64_t j = 0; j <= task_.num_draft_tokens[r]; ++j) {
        const int64_t at = r * logits.width + j, column = first + j;
        if (task_.selected[at] < 0 || task_.selected[at] >= logits.vocab) continue;
        const float cutoff =
            task_.cutoff == nullptr ? -float(kInf) : task_.cutoff[r * logits.width + column];
        rows_.push_back({static_cast<const unsigned char*>(logits.data) +
                             (r * logits.batch_stride + column * logits.width_stride) * bytes,
                         at, scale, std::fmax(cutoff, -std::numeric_limits<float>::max())});
      }
    }
  }

  static void unit(void* self, int64_t i) {
    Job& job = *static_cast<Job*>(self);
    i += job.first_;
    const Row& row = job.rows_[size_t(i / job.parts_)];
    const int64_t begin = i % job.parts_ * job.part_;
    Leaders* leaders = nullptr;
    if (job.task_.top_n > 0) leaders = &job.best_[size_t(i)];
    job.sums_[size_t(i)] =
        job.kernel_(row.data, begin, std::min(job.part_, job.task_.logits.vocab - begin), row.scale,
                    row.cutoff, leaders);
  }

  // The logarithm of the sum of all e^score of a row; NaN: there is no distribution.
  double normalizer(int64_t i) const {
    const LogSum* const parts = &sums_[size_t(i * parts_)];
    float top = -float(kInf);
    for (int64_t p = 0; p < parts_; ++p) top = std::max(top, parts[p].largest);
    double sum = 0;
    for (int64_t p = 0; p < parts_; ++p) {
      // Also if it is NaN.
      if (parts[p].sum != 0) sum += parts[p].sum * std::exp(double(parts[p].largest) - double(top));
    }
    return sum > 0 ? double(top) + std::log(sum) : kNan;
  }

  void write(int64_t i) {
    const Row& row = rows_[size_t(i)];
    const double normalizer = this->normalizer(i);
    const auto logprob = [&](float logit) {
      // The score is rounded to fp32. NaN where there is no distribution, below the cutoff, too.
      const double score = logit < row.cutoff ? -kInf : double(logit * row.scale);
      return float(score - normalizer);
    };
    task_.chosen[row.at] = logprob(logit_at(row.data, task_.logits.dtype, task_.selected[row.at]));
    if (task_.top_n == 0) return;
    float* const top = task_.top + row.at * task_.top_n;
    int32_t* const ids = task_.top_ids + row.at * task_.top_n;
    if (normalizer != normalizer) {
      std::fill_n(top, task_.top_n, float(kNan));
      return;
    }
    std::vector<Candidate>& all = best_[size_t(i * parts_)].heap;
    for (int64_t p = 1; p < parts_; ++p) {
      const std::vector<Candidate>& more = best_[size_t(i * parts_ + p)].heap;
      all.insert(all.end(), more.begin(), more.end());
    }
    const auto last = all.begin() + std::min(int64_t(all.size()), task_.top_n);
    std::partial_sort(all.begin(), last, all.end(), before);
    for (auto found = all.begin(); found != last; ++found) {
      ids[found - all.begin()] = found->id;
      top[found - all.begin()] = logprob(found->logit);
    }
  }

  const LogprobTask& task_;
  const int64_t threads_;
  SumAndLead kernel_;
  int64_t first_ = 0, parts_ = 1, part_ = 0;
  std::vector<Row> rows_;
  std::vector<LogSum> sums_;
  std::vector<Best> best_;
};

}  // namespace

void logprobs(const LogprobTask& task, int threads) {
  const Logits& logits = task.logits;
  check(logits, threads);
  item_bytes(logits.dtype);
  check_counts(logits, task.query_lens, task.num_draft_tokens);
  if (task.top_n < 0 || task.top_n > logits.vocab)
    throw std::invalid_argument("top_n must be 0 .. " + std::to_string(logits.vocab) +
                                ", the size of the vocabulary, is " + std::to_string(task.top_n));
  for (int64_t r = 0; r < logits.batch; ++r) {
    if (task.inv_temperature != nullptr && task.query_lens[r] != 0)
      check_scale(task.inv_temperature[r], r, "inv_temperature");
  }
  const int64_t columns = logits.batch * logits.width;
  std::fill_n(task.chosen, columns, -float(kInf));
  std::fill_n(task.top_ids, columns * task.top_n, -1);
  std::fill_n(task.top, columns * task.top_n, -float(kInf));
  Job(task, threads).run();
}

}  // namespace pipespec::cpu
