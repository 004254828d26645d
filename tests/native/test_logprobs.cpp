// Log-probabilities on the host: every SIMD variant against sums in double, in rows that end and
// begin beside pages that must not be touched. Run under sanitizers, too.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "cpu/logprobs.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Memory between two pages that crash on access.
class Fence {
 public:
  explicit Fence(size_t bytes) : bytes_(bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    usable_ = (bytes + page - 1) / page * page;
    all_ = usable_ + 2 * page;
    void* const p = mmap(nullptr, all_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<unsigned char*>(p) + page;
    if (mprotect(begin_, usable_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  ~Fence() { munmap(begin_ - (all_ - usable_) / 2, all_); }
  Fence(const Fence&) = delete;

  unsigned char* at_the(bool end) const { return end ? begin_ + usable_ - bytes_ : begin_; }

 private:
  size_t bytes_, usable_, all_;
  unsigned char* begin_;
};

// Small numbers, of which each dtype has the same.
void fill(DType dtype, unsigned char* row, int64_t n, std::mt19937& random) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = random() % 16 == 0 ? -kInf : float(int(random() % 129) - 64) / 4;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (dtype == DType::kFloat32) {
      std::memcpy(row + 4 * i, &bits, 4);
      continue;
    }
    uint16_t half = uint16_t(bits >> 16);
    if (dtype == DType::kFloat16) {
      const uint32_t magnitude = bits & 0x7FFFFFFF;
      half = uint16_t((bits >> 16 & 0x8000) |
                      (magnitude == 0            ? 0
                       : magnitude == 0x7F800000 ? 0x7C00
                                                 : (magnitude >> 13) - 0x1C000));
    }
    std::memcpy(row + 2 * i, &half, 2);
  }
}

void test_row(const std::string& name, DType dtype, int64_t vocab, bool end, float cutoff,
              int threads) {
  std::mt19937 random(uint32_t(vocab * 2 + end));
  const Fence fence(size_t(vocab * item_bytes(dtype)));
  unsigned char* const row = fence.at_the(end);
  fill(dtype, row, vocab, random);
  std::vector<float> x;
  for (int64_t i = 0; i < vocab; ++i) x.push_back(logit_at(row, dtype, i));
  const float scale = 0.75f;
  const int32_t fed = 1, drafts = 0, selected = int32_t(random() % uint64_t(vocab));
  const int64_t top_n = std::min<int64_t>(vocab, 7);
  float chosen = 7;
  std::vector<int32_t> ids(size_t(top_n), 7);
  std::vector<float> top(size_t(top_n), 7);
  logprobs({{row, dtype, 1, 1, vocab, vocab, vocab},
            &fed,
            &drafts,
            &selected,
            &scale,
            &cutoff,
            top_n,
            &chosen,
            ids.data(),
            top.data()},
           threads);

  double sum = 0, largest = -double(kInf);
  const auto score = [&](int64_t i) {
    return x[size_t(i)] < cutoff ? -double(kInf) : double(x[size_t(i)] * scale);
  };
  for (int64_t i = 0; i < vocab; ++i) largest = std::max(largest, score(i));
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(score(i) - largest);
  std::vector<int64_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return score(a) > score(b); });
  const auto same = [&](double wanted, float got) {
    if (std::isinf(wanted) || std::isnan(wanted))
      return std::isnan(wanted) ? got != got : got == float(wanted);
    return std::fabs(wanted - double(got)) <= 1e-6 + 2e-7 * std::fabs(wanted);
  };
  const double normalizer = largest > -double(kInf) ? largest + std::log(sum) : NAN;
  bool right = CHECK(same(score(selected) - normalizer, chosen));
  for (size_t i = 0; i < size_t(top_n) && right; ++i) {
    const bool there = score(order[i]) > -double(kInf);
    right = CHECK_EQ(ids[i], there ? int32_t(order[i]) : -1) &&
            CHECK(same(score(order[i]) - normalizer, top[i]));
  }
  if (!right) std::printf("%s: %d logits, dtype %d\n", name.c_str(), int(vocab), int(dtype));
}

}  // namespace

TEST(rows_of_all_lengths) {
  with_each_variant([](const std::string& name) {
    for (DType dtype : kDTypes) {
      for (int64_t vocab : {1, 2, 15, 16, 17, 63, 65, 127, 129, 511, 513, 1025, 4099}) {
        for (bool end : {false, true}) {
          test_row(name, dtype, vocab, end, -kInf, 1);
          test_row(name, dtype, vocab, end, 3.5f, 1);
        }
      }
    }
  });
}

TEST(rows_in_parts) {
  for (DType dtype : kDTypes) {
    for (bool end : {false, true}) test_row("threads", dtype, 70'001, end, -2.0f, 3);
  }
}

TEST(bad_numbers_write_nothing) {
  const float x[4] = {1, 2, 3, 4};
  float chosen[2] = {7, 7};
  const auto call = [&](int32_t fed, int32_t drafts, float scale, int64_t top_n, int threads) {
    const int32_t selected[2] = {0, 0};
    logprobs({{x, DType::kFloat32, 1, 2, 2, 4, 2},
              &fed,
              &drafts,
              selected,
              &scale,
              nullptr,
              top_n,
              chosen,
              nullptr,
              nullptr},
             threads);
  };
  CHECK_THROWS(call(3, 0, 1, 0, 1));
  CHECK_THROWS(call(1, 1, 1, 0, 1));
  CHECK_THROWS(call(1, 0, 0, 0, 1));
  CHECK_THROWS(call(1, 0, NAN, 0, 1));
  CHECK_THROWS(call(1, 0, 1, 3, 1));
  CHECK_THROWS(call(1, 0, 1, -1, 1));
  CHECK_THROWS(call(1, 0, 1, 0, 0));
  CHECK_EQ(chosen[0], 7.0f);
  call(2, 1, 1, 0, 1);
  CHECK(chosen[0] < 0 && chosen[1] < 0);
}

TEST_MAIN()
