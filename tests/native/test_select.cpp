// Row selection on the host: every SIMD variant and dtype against a scalar oracle, between pages
// that must not be touched, with threads and across fork(). NaNs of all kinds and rows further
// apart than 32 bits count are in tests/kernels (test_matrix.py, test_edges.py).
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cpu/pool.hpp"
#include "cpu/select.hpp"
#include "logits.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;
using namespace logits;

namespace {

// The oracle.
int32_t oracle(DType dtype, const void* row, int64_t n) {
  const auto* p = static_cast<const unsigned char*>(row);
  int32_t best = 0;
  double best_value = value(dtype, p);
  for (int64_t i = 0; i < n && !std::isnan(best_value); ++i) {
    const double x = value(dtype, p + i * item_bytes(dtype));
    if (std::isnan(x) || x > best_value) best = int32_t(i), best_value = x;
  }
  return best;
}

using Rng = std::mt19937_64;

enum class Kind { kNormal, kNegative, kFewValues, kAllMinusInf, kZeros, kNans, kAnyBits, kCount };

void fill(DType dtype, unsigned char* p, int64_t n, Kind kind, Rng& rng) {
  const int64_t size = item_bytes(dtype);
  std::normal_distribution<float> normal;
  const float few[] = {-kInf, -2.0f, -1.0f, -0.0f, 0.0f, 1.0f, 2.0f};
  for (int64_t i = 0; i < n; ++i) {
    float x = 0;
    switch (kind) {
      case Kind::kNormal:
      case Kind::kNans:
        x = normal(rng);
        break;
      case Kind::kNegative:
        x = -std::fabs(normal(rng)) - 0.25f;
        break;
      case Kind::kFewValues:
        x = few[rng() % 7];
        break;
      case Kind::kAllMinusInf:
        x = -kInf;
        break;
      case Kind::kZeros:
        x = rng() % 2 ? 0.0f : -0.0f;
        break;
      case Kind::kAnyBits:
      case Kind::kCount: {
        const uint64_t bits = rng();
        std::memcpy(p + i * size, &bits, size_t(size));
        continue;
      }
    }
    put(dtype, p + i * size, x);
  }
  if (kind == Kind::kNans) {
    for (int i = 0; i < 2; ++i)
      put(dtype, p + int64_t(rng() % uint64_t(n)) * size, rng() % 2 ? kNan : -kNan);
  }
}

int32_t select_row(DType dtype, const void* row, int64_t n, int threads = 1) {
  int32_t selected = -7;
  argmax({row, dtype, 1, 1, n, n, n}, &selected, threads);
  return selected;
}

}  // namespace

TEST(argmax_agrees_with_the_oracle_and_reads_nothing_else) {
  Rng rng(1);
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= 140; ++n) sizes.push_back(n);
  for (int64_t n : {511, 512, 513, 1000, 1024, 2047, 4096, 4097, 8191, 8193, 32000})
    sizes.push_back(n);
  const Guarded memory(4 * 32000 + 64);
  with_each_variant([&](const std::string& name) {
    for (DType dtype : kDTypes) {
      for (int64_t n : sizes) {
        for (int kind = 0; kind < int(Kind::kCount); ++kind) {
          unsigned char* const row = memory.place(n * item_bytes(dtype), rng());
          fill(dtype, row, n, Kind(kind), rng);
          if (!CHECK_EQ(select_row(dtype, row, n), oracle(dtype, row, n))) {
            std::fprintf(stderr, "  %s dtype %d n %lld kind %d\n", name.c_str(), int(dtype),
                         (long long)n, kind);
            return;
          }
        }
      }
    }
  });
}

TEST(every_position_can_win) {
  with_each_variant([&](const std::string&) {
    for (DType dtype : kDTypes) {
      const int64_t n = 9001, size = item_bytes(dtype);
      std::vector<unsigned char> row(size_t(n * size));
      for (const float rest : {-3.0f, 3.0f, -kInf}) {
        for (int64_t i = 0; i < n; ++i) put(dtype, &row[size_t(i * size)], rest);
        for (const float top : {-0.0f, 5.0f, kInf, kNan, -kNan}) {
          if (top == 0 && rest > 0) continue;
          for (int64_t i = 0; i < n; i += 1 + i / 200) {
            // An equal one later must not win; the equal of -0.0 is +0.0.
            const int64_t twin = (i + n) / 2;
            put(dtype, &row[size_t(twin * size)], top == 0 ? 0.0f : top);
            put(dtype, &row[size_t(i * size)], top);
            if (!CHECK_EQ(select_row(dtype, row.data(), n), i)) return;
            put(dtype, &row[size_t(i * size)], rest);
            put(dtype, &row[size_t(twin * size)], rest);
          }
        }
      }
    }
  });
}

TEST(verify_reads_nothing_behind_the_first_mismatch) {
  with_each_variant([&](const std::string&) {
    for (DType dtype : kDTypes) {
      for (int threads : {1, 2}) {
        // Each row of logits has pages of its own, so that the test can forbid any of them; 3 rows
        // of 256 KiB are enough for threads.
        const int64_t size = item_bytes(dtype), width = 5, batch = 4, row_bytes = 256 << 10;
        const int64_t vocab = row_bytes / size - 3, stride = row_bytes / size;
        const Guarded memory(size_t(batch * width * row_bytes));
        const auto row = [&](int64_t b, int64_t q) {
          return memory.begin() + (b * width + q) * row_bytes;
        };
        const int32_t choice[] = {0, 11, 222, int32_t(vocab - 1), 4444};
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t q = 0; q < width; ++q) {
            for (int64_t i = 0; i < vocab; ++i) put(dtype, row(b, q) + i * size, -1.0f);
            put(dtype, row(b, q) + choice[q] * size, 1.0f);
          }
        }
        // Column q chooses choice[q], so tokens[q + 1] == choice[q] agrees.
        std::vector<int64_t> tokens(size_t(batch * width), -5);
        const auto token = [&](int64_t b, int64_t q) -> int64_t& {
          return tokens[size_t(b * width + q)];
        };
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t q = 1; q < width; ++q) token(b, q) = choice[q - 1];
        }
        token(0, 3) = 7;  // row 0: two of four draft tokens hold
        token(2, 4) =
            int64_t{1} << 32 | choice[3];  // row 2: no such id, though its low half agrees
        const int32_t query_lens[] = {5, 0, 5, 4},
                      num_draft_tokens[] = {4, 3, 1,
                                            2};  // row 1 idles; row 3: two draft tokens, both hold
        const auto forbid = [&](int64_t b, int64_t q) {
          memory.forbid(row(b, q), size_t(row_bytes));
        };
        for (int64_t q : {3, 4}) forbid(0, q);
        for (int64_t q = 0; q < width; ++q) forbid(1, q);
        for (int64_t q : {0, 1, 2, 4}) forbid(2, q);
        for (int64_t q : {0, 4}) forbid(3, q);

        std::vector<int32_t> selected(size_t(batch * width), -7), accepted(size_t(batch), -7);
        verify({memory.begin(), dtype, batch, width, vocab, width * stride, stride},
               {tokens.data(), 8, width, 1}, query_lens, num_draft_tokens, selected.data(),
               accepted.data(), threads);
        CHECK_EQ(accepted, (std::vector<int32_t>{2, 0, 0, 2}));
        CHECK_EQ(selected, (std::vector<int32_t>{choice[0], choice[1], choice[2], -1, -1,  //
                                                 -1,        -1,        -1,        -1, -1,  //
                                                 choice[3], -1,        -1,        -1, -1,  //
                                                 choice[1], choice[2], choice[3], -1, -1}));
      }
    }
  });
}

TEST(many_callers_share_one_pool) {
  Rng rng(3);
  const int64_t batch = 3, width = 4, vocab = 50021;
  std::vector<uint16_t> data(size_t(batch * width * vocab));
  fill(DType::kBFloat16, reinterpret_cast<unsigned char*>(data.data()), int64_t(data.size()),
       Kind::kNormal, rng);
  std::vector<int32_t> best;
  for (int64_t i = 0; i < batch * width; ++i)
    best.push_back(oracle(DType::kBFloat16, &data[size_t(i * vocab)], vocab));
  std::vector<int32_t> tokens(size_t(batch * width), 0);
  for (int64_t i = 0; i < batch * width; ++i) {
    if (i % width != 0) tokens[size_t(i)] = best[size_t(i - 1)];
  }
  tokens[2] = -1;  // row 0 accepts one draft token, the others all three
  const std::vector<int32_t> query_lens(3, 4), num_draft_tokens(3, 3), expected{1, 3, 3};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 100; ++round) {
        std::vector<int32_t> selected(size_t(batch * width)), accepted(size_t(batch), -7);
        verify({data.data(), DType::kBFloat16, batch, width, vocab, width * vocab, vocab},
               {tokens.data(), 4, width, 1}, query_lens.data(), num_draft_tokens.data(),
               selected.data(), accepted.data(), 1 + (c + round) % 4);
        if (!CHECK_EQ(accepted, expected)) return;
        for (int64_t i = 0; i < batch * width; ++i) {
          if (!CHECK_EQ(selected[size_t(i)], i == 2 || i == 3 ? -1 : best[size_t(i)]) && i != 2)
            return;
        }
      }
    });
  }
  for (std::thread& t : callers) t.join();
}

#ifndef __SANITIZE_THREAD__  // its runtime refuses threads in the child of a fork
TEST(a_forked_child_starts_its_own_threads) {
  std::vector<float> row(300000, 0.0f);
  row[234567] = 1.0f;
  CHECK_EQ(select_row(DType::kFloat32, row.data(), int64_t(row.size()), 2), 234567);
  CHECK(pool_threads() >= 1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // a hang is a failure, too
    const bool fresh = pool_threads() == 0;
    const bool right = select_row(DType::kFloat32, row.data(), int64_t(row.size()), 3) == 234567;
    shutdown_pool();
    _exit(fresh && right ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_EQ(select_row(DType::kFloat32, row.data(), int64_t(row.size()), 2), 234567);
}
#endif

TEST(works_on_after_shutdown) {
  std::vector<float> row(300000, 0.0f);
  row[234567] = 1.0f;
  CHECK_EQ(select_row(DType::kFloat32, row.data(), int64_t(row.size()), 2), 234567);
  shutdown_pool();
  CHECK_EQ(pool_threads(), 0);
  CHECK_EQ(select_row(DType::kFloat32, row.data(), int64_t(row.size()), 2), 234567);
}

TEST_MAIN()
