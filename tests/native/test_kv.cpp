// Moves of keys and values on the host, against copies token by token. Run under AddressSanitizer,
// too: the storage is exactly as large as its strides need.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "cpu/kv.hpp"

using namespace pipespec::cpu;

namespace {

constexpr int64_t kBytes = 6;

// Tokens [rows, heads, positions], by heads or by positions.
struct Storage {
  int64_t rows, heads, positions;
  bool by_position;
  std::vector<char> data;

  Storage(int64_t rows_, int64_t heads_, int64_t positions_, bool by_position_,
          std::mt19937& random)
      : rows(rows_), heads(heads_), positions(positions_), by_position(by_position_) {
    data.resize(size_t(rows * heads * positions * kBytes));
    for (char& x : data) x = char(random());
  }
  StridedTokens view() {
    const int64_t row = heads * positions * kBytes;
    return by_position ? StridedTokens{data.data(), row, kBytes, heads * kBytes}
                       : StridedTokens{data.data(), row, positions * kBytes, kBytes};
  }
  std::vector<char> token(int64_t row, int64_t head, int64_t position) {
    const StridedTokens v = view();
    const char* at = v.data + row * v.row + head * v.head + position * v.position;
    return {at, at + kBytes};
  }
  void set(int64_t row, int64_t head, int64_t position, const std::vector<char>& token) {
    const StridedTokens v = view();
    std::copy(token.begin(), token.end(),
              v.data + row * v.row + head * v.head + position * v.position);
  }
};

struct Case {
  std::mt19937 random;
  int64_t rows, heads, capacity;
  Storage keys, values;
  std::vector<int32_t> lengths;

  explicit Case(uint32_t seed)
      : random(seed),
        rows(1 + draw(6)),
        heads(1 + draw(3)),
        capacity(1 + draw(12)),
        keys(rows, heads, capacity, draw(2) == 0, random),
        values(rows, heads, capacity, draw(2) == 0, random) {
    for (int64_t row = 0; row < rows; ++row) lengths.push_back(int32_t(draw(capacity + 1)));
  }
  int64_t draw(int64_t below) { return int64_t(random() % uint64_t(below)); }
  KvStorage storage() { return {keys.view(), values.view(), rows, heads, capacity, kBytes}; }
};

Integers narrow(const std::vector<int32_t>& numbers) { return {numbers.data(), false}; }
Integers wide(const std::vector<int64_t>& numbers) { return {numbers.data(), true}; }

TEST(rows_move_in_place_as_from_a_copy) {
  for (uint32_t seed = 0; seed < check::trials(2000, 50000); ++seed) {
    Case c(seed);
    std::vector<int64_t> sources;
    for (int64_t i = c.draw(c.rows + 1); i > 0; --i) sources.push_back(c.draw(c.rows));
    if (seed % 3 == 0) {  // a permutation, with its cycles
      sources.resize(size_t(c.rows));
      for (int64_t i = 0; i < c.rows; ++i) sources[size_t(i)] = i;
      std::shuffle(sources.begin(), sources.end(), c.random);
    }
    Storage keys = c.keys, values = c.values;
    for (size_t to = 0; to < sources.size(); ++to) {
      const int64_t from = sources[to];
      for (int64_t head = 0; head < c.heads; ++head) {
        for (int64_t p = 0; p < c.lengths[size_t(from)]; ++p) {
          keys.set(int64_t(to), head, p, c.keys.token(from, head, p));
          values.set(int64_t(to), head, p, c.values.token(from, head, p));
        }
      }
    }
    CHECK(kv_gather(c.storage(), narrow(c.lengths), wide(sources), int64_t(sources.size()), 2) ==
          -1);
    CHECK(c.keys.data == keys.data);
    CHECK(c.values.data == values.data);
  }
}

TEST(tokens_are_appended_and_compacted) {
  for (uint32_t seed = 0; seed < check::trials(2000, 50000); ++seed) {
    Case c(seed);
    const int64_t width = c.draw(c.capacity + 1);
    std::vector<int64_t> counts, positions;
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t room = c.capacity - c.lengths[size_t(row)];
      counts.push_back(c.draw(std::min(width, room) + 1));
      for (int64_t i = 0; i < width; ++i) {
        const int64_t first = c.lengths[size_t(row)] + i;
        positions.push_back(i < counts.back() ? first + c.draw(c.capacity - first) : -7);
      }
    }
    Storage fresh_keys(c.rows, c.heads, width, c.draw(2) == 0, c.random);
    Storage fresh_values(c.rows, c.heads, width, c.draw(2) == 0, c.random);
    Storage keys = c.keys, values = c.values;
    const auto expect = [&](auto&& token) {
      for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t head = 0; head < c.heads; ++head) {
          for (int64_t i = 0; i < counts[size_t(row)]; ++i) {
            const int64_t to = c.lengths[size_t(row)] + i;
            keys.set(row, head, to, token(fresh_keys, c.keys, row, head, i));
            values.set(row, head, to, token(fresh_values, c.values, row, head, i));
          }
        }
      }
    };
    expect([](Storage& fresh, Storage&, int64_t row, int64_t head, int64_t i) {
      return fresh.token(row, head, i);
    });
    CHECK(kv_append(c.storage(), fresh_keys.view(), fresh_values.view(), width, narrow(c.lengths),
                    wide(counts)) == -1);
    CHECK(c.keys.data == keys.data);
    CHECK(c.values.data == values.data);
    expect([&](Storage&, Storage& before, int64_t row, int64_t head, int64_t i) {
      return before.token(row, head, positions[size_t(row * width + i)]);
    });
    CHECK(kv_compact(c.storage(), wide(positions), width, 1, width, narrow(c.lengths),
                     wide(counts)) == -1);
    CHECK(c.keys.data == keys.data);
    CHECK(c.values.data == values.data);
  }
}

TEST(numbers_outside_of_the_storage_write_nothing) {
  std::mt19937 random(1);
  const Storage before(3, 2, 4, false, random);
  Storage s = before;
  const KvStorage storage{s.view(), s.view(), 3, 2, 4, kBytes};
  const auto numbers = [](int32_t a, int32_t b, int32_t c) {
    return std::vector<int32_t>{a, b, c};
  };
  Storage fresh(3, 2, 2, false, random);
  const auto append = [&](const std::vector<int32_t>& lengths, const std::vector<int32_t>& counts) {
    return kv_append(storage, fresh.view(), fresh.view(), 2, narrow(lengths), narrow(counts));
  };
  CHECK(append(numbers(0, 3, 0), numbers(2, 2, 2)) == 1);
  CHECK(append(numbers(0, 0, -1), numbers(2, 2, 2)) == 2);
  CHECK(append(numbers(0, 0, 0), numbers(2, 3, 2)) == 1);
  CHECK(append(numbers(0, 0, 0), numbers(-1, 2, 2)) == 0);
  CHECK(append(numbers(0, 5, 0), numbers(0, 0, 0)) == 1);
  const auto gather = [&](const std::vector<int32_t>& lengths,
                          const std::vector<int32_t>& sources) {
    return kv_gather(storage, narrow(lengths), narrow(sources), 3, 1);
  };
  CHECK(gather(numbers(1, 1, 5), numbers(1, 0, 2)) == 2);
  CHECK(gather(numbers(1, 1, 1), numbers(1, 3, 2)) == 1);
  CHECK(gather(numbers(1, 1, 1), numbers(-1, 1, 2)) == 0);
  const std::vector<int32_t> positions{1, 2, 1, 4, 0, 2};
  const auto compact = [&](const std::vector<int32_t>& begin, const std::vector<int32_t>& counts) {
    return kv_compact(storage, narrow(positions), 2, 1, 2, narrow(begin), narrow(counts));
  };
  CHECK(compact(numbers(0, 0, 0), numbers(2, 2, 2)) == 1);  // the capacity is 4
  CHECK(compact(numbers(0, 0, 1), numbers(2, 1, 1)) == 2);  // it would move up
  CHECK(compact(numbers(0, 0, 3), numbers(2, 1, 2)) == 2);
  CHECK(s.data == before.data);
}

}  // namespace
TEST_MAIN()
