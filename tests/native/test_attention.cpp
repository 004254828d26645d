// Attention over storage on the host, against sums in double precision. Run under AddressSanitizer,
// too: all memory is exactly as large as its strides need. Threads and refused numbers are in
// tests/kernels/test_native.py and test_refusals.py.
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "cpu/attention.hpp"
#include "cpu/number.hpp"
#include "simd_variants.hpp"

using namespace pipespec::cpu;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Numbers [rows, heads, columns, dim] in float32 or bfloat16, by heads or by columns.
struct Block {
  int64_t rows, heads, columns, dim;
  bool by_column, halves;
  std::vector<float> wide;
  std::vector<uint16_t> narrow;

  Block(int64_t rows_, int64_t heads_, int64_t columns_, int64_t dim_, bool by_column_,
        bool halves_, float value)
      : rows(rows_),
        heads(heads_),
        columns(columns_),
        dim(dim_),
        by_column(by_column_),
        halves(halves_),
        wide(halves ? 0 : size_t(rows * heads * columns * dim), value),
        narrow(halves ? size_t(rows * heads * columns * dim) : 0, bfloat16_of(value)) {}

  void strides(int64_t (&to)[3]) const {
    to[0] = heads * columns * dim;
    to[1] = by_column ? dim : columns * dim;
    to[2] = by_column ? heads * dim : dim;
  }
  void* data() { return halves ? static_cast<void*>(narrow.data()) : wide.data(); }
  size_t place(int64_t row, int64_t head, int64_t column, int64_t d) const {
    int64_t s[3];
    strides(s);
    return size_t(row * s[0] + head * s[1] + column * s[2] + d);
  }
  float get(int64_t row, int64_t head, int64_t column, int64_t d) const {
    const size_t at = place(row, head, column, d);
    return halves ? float_of_bfloat16(narrow[at]) : wide[at];
  }
  void set(int64_t row, int64_t head, int64_t column, int64_t d, float value) {
    const size_t at = place(row, head, column, d);
    if (halves)
      narrow[at] = bfloat16_of(value);
    else
      wide[at] = value;
  }
};

struct Case {
  std::mt19937 random;
  bool halves;
  int64_t rows, kv_heads, group, columns, dim, capacity, window;
  float softcap, scale;
  Block queries, keys, values, out;
  std::vector<int32_t> lengths;
  std::vector<int64_t> counts;

  explicit Case(uint32_t seed)
      : random(seed),
        halves(draw(2) == 0),
        rows(1 + draw(3)),
        kv_heads(1 + draw(2)),
        group(1 + draw(8)),
        columns(1 + draw(11)),
        // In a third of the cases whole vectors.
        dim(draw(3) == 0 ? 32 * (1 + draw(3)) : 1 + draw(40)),
        // In a fifth of the cases several spans of positions.
        capacity(columns + draw(draw(5) == 0 ? 700 : 90)),
        window(draw(2) == 0 ? 0 : 1 + draw(capacity)),
        softcap(draw(2) == 0 ? 0.0f : 1.5f),
        scale(draw(4) == 0 ? -0.4f : 0.4f),
        queries(rows, kv_heads * group, columns, dim, draw(2) == 0, halves, kNaN),
        keys(rows, kv_heads, capacity, dim, draw(2) == 0, halves, kNaN),
        values(rows, kv_heads, capacity, dim, draw(2) == 0, halves, kNaN),
        out(rows, kv_heads * group, columns, dim, draw(2) == 0, halves, kNaN) {
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < rows; ++row) {
      counts.push_back(draw(columns + 1));
      lengths.push_back(int32_t(draw(capacity - counts.back() + 1)));
      for (int64_t head = 0; head < kv_heads * group; ++head)
        for (int64_t j = 0; j < counts.back(); ++j)
          for (int64_t d = 0; d < dim; ++d) queries.set(row, head, j, d, normal(random));
      for (int64_t head = 0; head < kv_heads; ++head) {
        for (int64_t t = first(row, 0); t < lengths.back() + counts.back(); ++t) {
          for (int64_t d = 0; d < dim; ++d) {
            keys.set(row, head, t, d, normal(random));
            values.set(row, head, t, d, normal(random));
          }
        }
      }
    }
  }
  int64_t draw(int64_t below) { return int64_t(random() % uint64_t(below)); }
  int64_t first(int64_t row, int64_t column) const {
    const int64_t end = lengths[size_t(row)] + column + 1;
    return window > 0 && window < end ? end - window : 0;
  }
  int64_t run(int threads) {
    Attention a{};
    a.dtype = halves ? DType::kBFloat16 : DType::kFloat32;
    a.rows = rows, a.heads = kv_heads * group, a.kv_heads = kv_heads;
    a.columns = columns, a.head_dim = dim, a.capacity = capacity;
    a.queries = queries.data(), a.keys = keys.data(), a.values = values.data();
    a.out = out.data();
    queries.strides(a.query_strides), keys.strides(a.key_strides);
    values.strides(a.value_strides), out.strides(a.out_strides);
    a.window = window, a.scale = scale, a.softcap = softcap;
    return attend(a, {lengths.data(), false}, {counts.data(), true}, threads);
  }
  double expected(int64_t row, int64_t head, int64_t column, int64_t d) const {
    const int64_t end = lengths[size_t(row)] + column + 1, kv = head / group;
    double highest = -std::numeric_limits<double>::infinity(), sum = 0, result = 0;
    std::vector<double> scores;
    for (int64_t t = first(row, column); t < end; ++t) {
      double score = 0;
      for (int64_t i = 0; i < dim; ++i)
        score += double(queries.get(row, head, column, i)) * double(keys.get(row, kv, t, i));
      score *= double(scale);
      scores.push_back(softcap > 0 ? softcap * std::tanh(score / softcap) : score);
      highest = std::max(highest, scores.back());
    }
    for (double& score : scores) sum += score = std::exp(score - highest);
    for (size_t i = 0; i < scores.size(); ++i)
      result += scores[i] / sum * double(values.get(row, kv, first(row, column) + int64_t(i), d));
    return result;
  }
};

TEST(numbers_are_those_of_double_precision) {
  with_each_variant([](const std::string&) {
    for (uint32_t seed = 0; seed < check::trials(150, 5000); ++seed) {
      Case c(seed);
      CHECK_EQ(c.run(1 + int(seed % 3)), -1);
      const double tolerance = c.halves ? 2e-2 : 2e-5;
      for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t head = 0; head < c.kv_heads * c.group; ++head) {
          for (int64_t j = 0; j < c.columns; ++j) {
            const int64_t d = c.draw(c.dim);
            const double right = j < c.counts[size_t(row)] ? c.expected(row, head, j, d) : 0;
            // Not `<`: NaN must fail.
            if (!CHECK(std::abs(double(c.out.get(row, head, j, d)) - right) <= tolerance)) return;
          }
        }
      }
    }
  });
}

// Few queries read storage where it lies, many pack it.
TEST(a_column_alone_has_the_bits_that_it_has_among_others) {
  with_each_variant([](const std::string&) {
    for (uint32_t seed = 0; seed < check::trials(60, 2000); ++seed) {
      Case all(seed);
      CHECK_EQ(all.run(1), -1);
      Case one = all;
      for (int64_t j = 0; j < all.columns; ++j) {
        for (int64_t row = 0; row < all.rows; ++row) {
          const bool is_fed = j < all.counts[size_t(row)];
          one.counts[size_t(row)] = is_fed;
          one.lengths[size_t(row)] = all.lengths[size_t(row)] + int32_t(is_fed ? j : 0);
          for (int64_t head = 0; is_fed && head < all.kv_heads * all.group; ++head)
            for (int64_t d = 0; d < all.dim; ++d)
              one.queries.set(row, head, 0, d, all.queries.get(row, head, j, d));
        }
        CHECK_EQ(one.run(1), -1);
        for (int64_t row = 0; row < all.rows; ++row)
          for (int64_t head = 0; j < all.counts[size_t(row)] && head < all.kv_heads * all.group;
               ++head)
            for (int64_t d = 0; d < all.dim; ++d)
              if (!CHECK(bits_of(one.out.get(row, head, 0, d)) ==
                         bits_of(all.out.get(row, head, j, d))))
                return;
      }
    }
  });
}

// A number that is not finite spoils what sees it and nothing else, whatever is computed with it.
TEST(a_column_does_not_depend_on_what_it_does_not_see) {
  with_each_variant([](const std::string&) {
    for (uint32_t seed = 0; seed < check::trials(60, 2000); ++seed) {
      Case c(seed);
      const auto row = size_t(c.draw(c.rows));
      if (c.counts[row] == 0) continue;
      const int64_t at = c.first(int64_t(row), 0) +
                         c.draw(c.lengths[row] + c.counts[row] - c.first(int64_t(row), 0));
      c.values.set(int64_t(row), 0, at, 0, std::numeric_limits<float>::infinity());
      CHECK_EQ(c.run(1), -1);
      for (int64_t j = 0; j < c.counts[row]; ++j) {
        const bool sees = c.first(int64_t(row), j) <= at && at <= c.lengths[row] + j;
        if (!CHECK(std::isfinite(c.out.get(int64_t(row), 0, j, 0)) != sees)) return;
      }
    }
  });
}

}  // namespace

TEST_MAIN()
