// New keys and values in storage on the host, against copies token by token. Run under
// AddressSanitizer, too: the storage is exactly as large as its strides need.
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

TEST(tokens_are_appended) {
  for (uint32_t seed = 0; seed < check::trials(2000, 50000); ++seed) {
    Case c(seed);
    const int64_t width = c.draw(c.capacity + 1);
    std::vector<int64_t> counts;
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t room = c.capacity - c.lengths[size_t(row)];
      counts.push_back(c.draw(std::min(width, room) + 1));
    }
    Storage fresh_keys(c.rows, c.heads, width, c.draw(2) == 0, c.random);
    Storage fresh_values(c.rows, c.heads, width, c.draw(2) == 0, c.random);
    Storage keys = c.keys, values = c.values;
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t head = 0; head < c.heads; ++head) {
        for (int64_t i = 0; i < counts[size_t(row)]; ++i) {
          const int64_t to = c.lengths[size_t(row)] + i;
          keys.set(row, head, to, fresh_keys.token(row, head, i));
          values.set(row, head, to, fresh_values.token(row, head, i));
        }
      }
    }
    CHECK(kv_append(c.storage(), fresh_keys.view(), fresh_values.view(), width, narrow(c.lengths),
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
  CHECK(s.data == before.data);
}

}  // namespace
TEST_MAIN()
