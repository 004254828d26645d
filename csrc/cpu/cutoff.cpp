#include "cutoff.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "number.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kParallelBytes = 32 << 10;  // a logit takes about as long as one with noise
constexpr int64_t kBlock = 64;
constexpr int kBins = 1 << 16;

// A dtype's numbers as signed integers of the same order ("keys"); -0.0 comes before +0.0, a NaN
// lies beyond the infinity of its sign.
template <class LaneT, int kInfinity>
struct Keys {
  using Lane = LaneT;
  static constexpr int kBits = 8 * int(sizeof(Lane));
  static constexpr Lane kInfKey = Lane(kInfinity);
  static constexpr Lane kMinusInfKey = Lane(~kInfKey);
  static Lane key(Lane bits) {
    return Lane(bits ^ (Lane(bits >> (kBits - 1)) & std::numeric_limits<Lane>::max()));
  }
  // Which of kBins bins, ascending.
  static int bin(Lane key) { return int(key >> (kBits - 16)) + kBins / 2; }
};

struct Float32 : Keys<int32_t, 0x7F800000> {
  static float value(Lane k) {
    const Lane bits = key(k);  // its own inverse
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
};

struct BFloat16 : Keys<int16_t, 0x7F80> {
  static float value(Lane k) { return float_of_bfloat16(uint16_t(key(k))); }
};

struct Float16 : Keys<int16_t, 0x7C00> {
  static float value(Lane k) { return float_of_float16(uint16_t(key(k))); }
};

// Working memory of one thread.
struct Scratch {
  std::vector<uint32_t> count;
  std::vector<double> mass;
  std::vector<int32_t> keys, block_max;
};

struct Limits {
  float inv_temperature;
  int64_t top_k;
  double top_p, min_p;
};

template <class Format>
class Row {
 public:
  using Lane = typename Format::Lane;

  Row(const void* data, int64_t n, const Limits& limits, Scratch& scratch)
      : data_(static_cast<const unsigned char*>(data)), n_(n), limits_(limits), scratch_(scratch) {}

  float cutoff() {
    const bool k_on = limits_.top_k > 0 && limits_.top_k < n_;
    const bool p_on = limits_.top_p < 1;
    if (!k_on && !p_on && limits_.min_p <= 0) return -kInf;
    if (!look()) return -kInf;
    Lane bar = Format::kMinusInfKey;
    if (k_on && limits_.top_k <= n_ / kBlock / 4) {
      bar = by_list(p_on);
    } else if (k_on || p_on) {
      bar = by_bins(k_on, p_on);
    }
    if (limits_.min_p > 0) bar = std::max(bar, smallest_from(std::max(bar, bar_of_min_p())));
    return Format::value(bar) + 0.0f;  // -0.0 becomes +0.0
  }

 private:
  Lane key(int64_t i) const {
    Lane bits;
    std::memcpy(&bits, data_ + i * int64_t(sizeof(Lane)), sizeof(bits));
    return Format::key(bits);
  }

  float scaled(Lane k) const { return Format::value(k) * limits_.inv_temperature; }

  // Probability relative to the largest. The comparison also settles infinity against infinity.
  double weight(Lane k) const {
    const float y = scaled(k);
    return y == top_scaled_ ? 1.0 : std::exp(double(y) - double(top_scaled_));
  }

  // Largest keys of the blocks; false if there is a NaN, or nothing but -inf.
  bool look() {
    std::vector<int32_t>& block_max = scratch_.block_max;
    block_max.clear();
    Lane low = std::numeric_limits<Lane>::max();
    for (int64_t i = 0; i < n_; i += kBlock) {
      const int64_t end = std::min(i + kBlock, n_);
      Lane high = std::numeric_limits<Lane>::min();
      for (int64_t j = i; j < end; ++j) {
        const Lane k = key(j);
        high = std::max(high, k);
        low = std::min(low, k);
      }
      block_max.push_back(high);
    }
    top_ = Lane(*std::max_element(block_max.begin(), block_max.end()));
    top_scaled_ = scaled(top_);
    return top_ <= Format::kInfKey && low >= Format::kMinusInfKey && top_ > Format::kMinusInfKey;
  }

  // Keys from `bar` on.
  void gather(Lane bar) {
    std::vector<int32_t>& keys = scratch_.keys;
    keys.clear();
    for (int64_t block = 0; block * kBlock < n_; ++block) {
      if (scratch_.block_max[size_t(block)] < bar) continue;
      for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, n_); ++i) {
        if (key(i) >= bar) keys.push_back(key(i));
      }
    }
  }

  // A small k: k blocks have a maximum that is at least the k-th largest block maximum. So the k-th
  // largest logit is at least that maximum, and few logits are larger.
  Lane by_list(bool p_on) {
    std::vector<int32_t> best = scratch_.block_max;
    const auto kth = [&](std::vector<int32_t>& from) {
      const auto at = from.begin() + (limits_.top_k - 1);
      std::nth_element(from.begin(), at, from.end(), std::greater<>());
      return Lane(*at);
    };
    gather(kth(best));
    std::vector<int32_t>& keys = scratch_.keys;
    const Lane bar = same_value(kth(keys));
    if (!p_on) return bar;
    std::sort(keys.begin(), keys.end(), std::greater<>());
    double total = 0;
    for (const int32_t k : keys) total += k >= bar ? weight(Lane(k)) : 0;
    double sum = 0;
    for (const int32_t k : keys) {
      sum += weight(Lane(k));
      if (k <= bar || sum >= limits_.top_p * total) return std::max(bar, same_value(Lane(k)));
    }
    return bar;
  }

  // +0.0 becomes -0.0, the lower key: both zeros are one value.
  static Lane same_value(Lane k) { return k == 0 ? Lane(-1) : k; }

  // The general case: a histogram over the upper 16 bits. For 16-bit logits a bin is a value;
  // otherwise the bin that contains a limit is searched element by element.
  Lane by_bins(bool k_on, bool p_on) {
    constexpr bool kExact = Format::kBits == 16;
    std::vector<uint32_t>& count = scratch_.count;
    count.assign(kBins, 0);
    for (int64_t i = 0; i < n_; ++i) ++count[size_t(Format::bin(key(i)))];
    const int top = Format::bin(top_);

    Lane bar = Format::kMinusInfKey;
    int last = Format::bin(bar);  // the bin of bar; everything above it is kept
    if (k_on) {
      int64_t left = limits_.top_k;
      int b = top;
      for (; left > int64_t(count[size_t(b)]); --b) left -= count[size_t(b)];
      last = b;
      if constexpr (kExact) {
        bar = key_of_bin(b);
      } else {
        collect(b);
        bar = Lane(scratch_.keys[size_t(left - 1)]);
      }
      bar = same_value(bar);
      last = Format::bin(bar);
    }
    if (!p_on) return bar;

    std::vector<double>& mass = scratch_.mass;
    mass.assign(kBins, 0.0);
    if constexpr (kExact) {
      for (int b = last; b <= top; ++b) {
        if (count[size_t(b)] != 0) mass[size_t(b)] = count[size_t(b)] * weight(key_of_bin(b));
      }
    } else {
      for (int64_t i = 0; i < n_; ++i) {
        const Lane k = key(i);
        if (k >= bar) mass[size_t(Format::bin(k))] += weight(k);
      }
    }
    double total = 0;
    for (int b = last; b <= top; ++b) total += mass[size_t(b)];
    const double wanted = limits_.top_p * total;
    double sum = 0;
    int b = top;
    for (; b > last && sum + mass[size_t(b)] < wanted; --b) sum += mass[size_t(b)];
    // The sum reaches `wanted` in a bin with elements, except where `wanted` is 0 or rounding hides
    // the rest. Then the next value down is as good.
    while (b > last && count[size_t(b)] == 0) --b;
    if constexpr (kExact) return std::max(bar, same_value(key_of_bin(b)));
    collect(b);
    for (const int32_t k : scratch_.keys) {
      sum += weight(Lane(k));
      if (k <= bar || sum >= wanted) return std::max(bar, same_value(Lane(k)));
    }
    return scratch_.keys.empty() ? bar : std::max(bar, same_value(Lane(scratch_.keys.back())));
  }

  static Lane key_of_bin(int b) { return Lane(b - kBins / 2); }

  // The keys of one bin, in descending order.
  void collect(int bin) {
    std::vector<int32_t>& keys = scratch_.keys;
    keys.clear();
    for (int64_t i = 0; i < n_; ++i) {
      const Lane k = key(i);
      if (Format::bin(k) == bin) keys.push_back(k);
    }
    std::sort(keys.begin(), keys.end(), std::greater<>());
  }

  // The smallest number of the dtype that passes min-p: weight() never falls where the key rises.
  Lane bar_of_min_p() const {
    int64_t fails = Format::kMinusInfKey, passes = top_;
    while (passes - fails > 1) {
      const int64_t middle = fails + (passes - fails) / 2;
      (weight(Lane(middle)) >= limits_.min_p ? passes : fails) = middle;
    }
    return same_value(Lane(passes));
  }

  // The smallest key of the row that is at least `bar`.
  Lane smallest_from(Lane bar) const {
    Lane smallest = top_;
    for (int64_t block = 0; block * kBlock < n_; ++block) {
      if (scratch_.block_max[size_t(block)] < bar) continue;
      for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, n_); ++i) {
        const Lane k = key(i);
        if (k >= bar) smallest = std::min(smallest, k);
      }
    }
    return smallest;
  }

  const unsigned char* data_;
  int64_t n_;
  Limits limits_;
  Scratch& scratch_;
  Lane top_ = 0;
  float top_scaled_ = 0;
};

// Rows in any order, each by one thread.
struct Job {
  struct Item {
    const void* data;
    int64_t batch_row;
    float* out;
  };

  const Logits& logits;
  const Filters& filters;
  std::vector<Item> items;
  std::vector<Scratch> scratch;
  std::unique_ptr<std::atomic<bool>[]> taken;  // as many as there are threads: one is always free
  int64_t first = 0;                           // item of unit 0

  static void unit(void* self, int64_t i) { static_cast<Job*>(self)->unit(i); }

  void unit(int64_t i) {
    size_t mine = 0;
    while (taken[mine].exchange(true, std::memory_order_acquire))
      mine = (mine + 1) % scratch.size();
    const Item& item = items[size_t(first + i)];
    const int64_t r = item.batch_row;
    const Limits limits{filters.inv_temperature[r], filters.top_k[r], filters.top_p[r],
                        filters.min_p[r]};
    const auto run = [&](auto format) {
      return Row<decltype(format)>(item.data, logits.vocab, limits, scratch[mine]).cutoff();
    };
    *item.out = logits.dtype == DType::kFloat32    ? run(Float32{})
                : logits.dtype == DType::kBFloat16 ? run(BFloat16{})
                                                   : run(Float16{});
    taken[mine].store(false, std::memory_order_release);
  }
};

void check(const Filters& filters, int64_t row) {
  const auto refuse = [row](const char* what) {
    throw std::invalid_argument("row " + std::to_string(row) + ": " + what);
  };
  const float scale = filters.inv_temperature[row];
  if (!(scale > 0) || !std::isfinite(scale)) refuse("inv_temperature must be finite and positive");
  if (filters.top_k[row] < 0) refuse("top_k must not be negative");
  if (!(filters.top_p[row] >= 0 && filters.top_p[row] <= 1)) refuse("top_p must be 0 .. 1");
  if (!(filters.min_p[row] >= 0 && filters.min_p[row] <= 1)) refuse("min_p must be 0 .. 1");
}

}  // namespace

void cutoff(const Logits& logits, const Filters& filters, const int32_t* query_lens,
            const int32_t* num_draft_tokens, float* cutoff, int threads) {
  check(logits, threads);
  const int64_t size = item_bytes(logits.dtype);
  if (query_lens != nullptr) check_counts(logits, query_lens, num_draft_tokens);
  for (int64_t r = 0; r < logits.batch; ++r) check(filters, r);

  Job job{logits, filters, {}, {}, {}, 0};
  for (int64_t b = 0; b < logits.batch; ++b) {
    const int64_t end = query_lens == nullptr ? logits.width : query_lens[b];
    const int64_t begin = query_lens == nullptr || end == 0 ? 0 : end - 1 - num_draft_tokens[b];
    for (int64_t q = 0; q < logits.width; ++q) {
      float* const out = cutoff + b * logits.width + q;
      *out = -kInf;
      if (q < begin || q >= end) continue;
      job.items.push_back({static_cast<const unsigned char*>(logits.data) +
                               (b * logits.batch_stride + q * logits.width_stride) * size,
                           b, out});
    }
  }
  const int64_t rows = int64_t(job.items.size());
  const bool alone = rows < 2 || rows * logits.vocab * size < kParallelBytes;
  const int64_t helpers = alone ? 0 : std::min<int64_t>({rows - 1, threads - 1, 63});
  job.scratch.resize(size_t(helpers + 1));
  job.taken = std::make_unique<std::atomic<bool>[]>(size_t(helpers + 1));
  Team team(int(helpers), &Job::unit, &job);
  for (; job.first < rows; job.first += Team::kMaxUnits)
    team.run(std::min(rows - job.first, Team::kMaxUnits));
}

}  // namespace pipespec::cpu
