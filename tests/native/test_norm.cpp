// The residual add and RMS norm of the host: the formula in double, rows by themselves, in place.
// Run under AddressSanitizer and UBSan, too: rows are copied to buffers of exactly their size.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cpu/norm.hpp"
#include "cpu/number.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;

namespace {

// A small bfloat16 number, as bits of `T`.
template <class T>
T draw(std::mt19937& random) {
  const float x = float(int(random() % 513) - 256) / 64;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if constexpr (sizeof(T) == 2) return T(bits >> 16);
  return x;
}

template <class T>
double value(T x) {
  if constexpr (sizeof(T) == 2) return float_of_bfloat16(x);
  return x;
}

template <class T>
std::vector<T> numbers(std::mt19937& random, int64_t count) {
  std::vector<T> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(draw<T>(random));
  return out;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
void test_rows(const std::string& name, bool residual, bool one_plus, bool with_bias, int64_t n) {
  constexpr int64_t kRows = 3;
  constexpr DType kDType = sizeof(T) == 2 ? DType::kBFloat16 : DType::kFloat32;
  const double step = sizeof(T) == 2 ? 1.0 / 64 : 1e-5;  // several roundings
  std::mt19937 random(uint32_t(n * 8 + residual * 4 + one_plus * 2 + with_bias));
  const std::vector<T> x = numbers<T>(random, kRows * n), r = numbers<T>(random, kRows * n);
  const std::vector<T> weight = numbers<T>(random, n), bias = numbers<T>(random, n);
  std::vector<T> out(x.size()), total(x.size());
  NormTask task{kDType,
                kRows,
                n,
                x.data(),
                n,
                residual ? r.data() : nullptr,
                n,
                weight.data(),
                with_bias ? bias.data() : nullptr,
                1e-5f,
                one_plus,
                out.data(),
                n,
                total.data(),
                n};
  add_rms_norm(task);
  for (int64_t row = 0; row < kRows; ++row) {
    double squares = 0;
    std::vector<double> sum;
    for (int64_t i = row * n; i < (row + 1) * n; ++i) {
      sum.push_back(residual ? value(total[size_t(i)]) : value(x[size_t(i)]));
      if (residual) {
        const double exact = value(x[size_t(i)]) + value(r[size_t(i)]);
        if (!CHECK(std::fabs(sum.back() - exact) <= std::fabs(exact) / 256)) return;
      }
      squares += sum.back() * sum.back();
    }
    const double factor = 1 / std::sqrt(squares / double(n) + 1e-5);
    for (int64_t i = 0; i < n; ++i) {
      const double w = value(weight[size_t(i)]) + (one_plus ? 1 : 0);
      const double b = with_bias ? value(bias[size_t(i)]) : 0;
      const double product = sum[size_t(i)] * factor * w, got = value(out[size_t(row * n + i)]);
      const double room = step * (std::fabs(product) + std::fabs(b) + 1e-3);
      if (!CHECK(std::fabs(got - product - b) <= room)) {
        std::printf("%s: row %d, number %d\n", name.c_str(), int(row), int(i));
        return;
      }
    }
    // Alone, in buffers of its size.
    const auto part = [&](const std::vector<T>& of) {
      return std::vector<T>(of.begin() + row * n, of.begin() + (row + 1) * n);
    };
    std::vector<T> a = part(x), b = part(r);
    NormTask alone = task;
    alone.rows = 1;
    alone.x = a.data();
    alone.residual = residual ? b.data() : nullptr;
    // In place, either way around.
    alone.out = row % 2 == 0 || !residual ? a.data() : b.data();
    alone.total = row % 2 == 0 ? b.data() : a.data();
    add_rms_norm(alone);
    CHECK(same(row % 2 == 0 || !residual ? a : b, part(out)));
    if (residual) CHECK(same(row % 2 == 0 ? b : a, part(total)));
  }
}

}  // namespace

TEST(rows_are_normalised) {
  with_each_variant([](const std::string& name) {
    for (int64_t n : {1, 3, 16, 64, 100, 257}) {
      for (int flags = 0; flags < 8; ++flags) {
        test_rows<float>(name, flags & 1, flags & 2, flags & 4, n);
        test_rows<uint16_t>(name, flags & 1, flags & 2, flags & 4, n);
      }
    }
  });
}

TEST(no_rows) {
  add_rms_norm({DType::kFloat32, 0, 8, nullptr, 8, nullptr, 8, nullptr, nullptr, 1e-5f, false,
                nullptr, 8, nullptr, 8});
}

TEST_MAIN()
