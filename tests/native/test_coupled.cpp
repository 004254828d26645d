// Coupled selection on the host: the noise and its bound, and every SIMD variant against a loop
// over the definition, between pages that must not be touched. Philox's published vectors and the
// bits of the noise are in tests/kernels/test_noise.py.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/select.hpp"
#include "logits.hpp"
#include "protocol/gumbel.hpp"
#include "protocol/philox.hpp"
#include "simd_variants.hpp"

using namespace pipespec;
using namespace pipespec::cpu;
using namespace logits;

namespace {

float bound(uint32_t r) {
  const float f = float(int32_t(r >> 1));
  return noise::kBoundOffset - noise::kBoundSlope * float(int32_t(bits_of(f)));
}

// The definition, one id after the other.
int32_t by_hand(const std::vector<float>& row, uint64_t seed, int64_t position, float scale,
                float cutoff) {
  int32_t best = 0;
  float best_y = -kInf;
  for (size_t v = 0; v < row.size(); ++v) {
    if (row[v] < cutoff) continue;
    const float g =
        noise::gumbel(philox::draw(seed, uint64_t(position), kTargetStream, uint32_t(v)));
    const float scaled = row[v] * scale;
    const float y = scaled + g;
    if (std::isnan(y)) return int32_t(v);
    if (y > best_y) best = int32_t(v), best_y = y;
  }
  return best;
}

}  // namespace

TEST(noise_stays_near_the_truth_and_below_its_bound) {
  const auto look = [](uint32_t r) {
    const float g = noise::gumbel(r);
    const double u = (double(r) + 0.5) * 0x1p-32;
    const double truth = -std::log(-std::log1p(-u));
    return CHECK(g <= bound(r)) && CHECK(g <= noise::kCeiling) &&
           CHECK(truth < -1 || std::fabs(g - truth) < 3.2e-5) && CHECK(std::isfinite(g));
  };
  std::vector<uint32_t> all;
  for (uint32_t r = 0; r < 5000; ++r) all.push_back(r), all.push_back(~r);
  for (int shift = 12; shift < 32; ++shift) {
    for (uint32_t d = 0; d < 2000; ++d) {
      all.push_back((1u << shift) + d);
      all.push_back((1u << shift) - d);
    }
  }
  for (uint64_t r = 0; r < uint64_t{1} << 32; r += 16381) all.push_back(uint32_t(r));
  for (const uint32_t r : all) {
    if (!look(r)) {
      std::fprintf(stderr, "  r %u\n", r);
      return;
    }
  }
  CHECK(noise::gumbel(0) > 22.87f);
}

TEST(sample_agrees_with_the_definition_and_reads_nothing_else) {
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  const Guarded memory(32 << 12);
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= 70; ++n) sizes.push_back(n);
  for (int64_t n : {127, 128, 1000, 4097, 30000}) sizes.push_back(n);
  with_each_variant([&](const std::string& name) {
    for (const int64_t n : sizes) {
      for (int kind = 0; kind < 5; ++kind) {
        // Values that bfloat16 has, too.
        std::vector<float> row;
        for (int64_t i = 0; i < n; ++i) {
          float x = kind == 1 ? -kInf : float(int(normal(rng) * 32)) / 8;
          if (kind == 2 && rng() % 4 == 0) x = kInf;
          if (kind == 3 && rng() % 50 == 0) x = std::nanf("");
          if (kind == 4 && rng() % 2 == 0) x = -kInf;
          row.push_back(x);
        }
        const uint64_t seed = rng();
        const int64_t position = int64_t(rng() >> 30);
        const float scale = 0.25f + float(rng() % 1000) / 500;
        const float cutoff = rng() % 2 ? row[rng() % size_t(n)] : -kInf;
        const Noise noise{&seed, &position, &scale, &cutoff, kTargetStream};
        const int32_t expected = by_hand(row, seed, position, scale, cutoff);
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
          const int64_t size = item_bytes(dtype);
          unsigned char* const data = memory.place(n * size, rng());
          for (int64_t i = 0; i < n; ++i) put(dtype, data + i * size, row[size_t(i)]);
          for (const int threads : {1, 3}) {
            int32_t selected = -7;
            sample({data, dtype, 1, 1, n, n, n}, noise, &selected, threads);
            if (!CHECK_EQ(selected, expected)) {
              std::fprintf(stderr, "  %s dtype %d n %lld kind %d\n", name.c_str(), int(dtype),
                           (long long)n, kind);
              return;
            }
          }
        }
      }
    }
  });
}

TEST_MAIN()
