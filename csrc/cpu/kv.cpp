#include "kv.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "pool.hpp"

namespace pipespec::cpu {
namespace {

char* place(const StridedTokens& tokens, int64_t row, int64_t head, int64_t position) {
  return tokens.data + row * tokens.row + head * tokens.head + position * tokens.position;
}

// `count` tokens, `to_step` and `from_step` bytes apart, which do not overlap.
void copy(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t bytes,
          int64_t count) {
  if (count == 0) return;  // the addresses may be null
  if (to_step == bytes && from_step == bytes) {
    std::memcpy(to, from, size_t(bytes * count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_step, from + i * from_step, size_t(bytes));
  }
}

bool fits(int64_t first, int64_t count, int64_t width, int64_t capacity) {
  return count >= 0 && count <= width && first >= 0 && first <= capacity - count;
}

constexpr int64_t kScratch = -1;

// Row `to` becomes what row `from` was; kScratch is a row beside the storage.
struct Move {
  int64_t to, from;
};

// The moves in an order in which no row is overwritten before it is read for the last time.
std::vector<Move> in_order(const std::vector<int64_t>& sources, int64_t rows) {
  const auto moved = int64_t(sources.size());
  std::vector<int64_t> readers(size_t(rows), 0), ready;
  std::vector<bool> pending(size_t(rows), false);
  for (int64_t to = 0; to < moved; ++to) {
    if (sources[size_t(to)] == to) continue;
    pending[size_t(to)] = true;
    ++readers[size_t(sources[size_t(to)])];
  }
  for (int64_t to = 0; to < moved; ++to) {
    if (pending[size_t(to)] && readers[size_t(to)] == 0) ready.push_back(to);
  }
  std::vector<Move> moves;
  while (!ready.empty()) {
    const int64_t to = ready.back(), from = sources[size_t(to)];
    ready.pop_back();
    moves.push_back({to, from});
    pending[size_t(to)] = false;
    if (--readers[size_t(from)] == 0 && pending[size_t(from)]) ready.push_back(from);
  }
  // The rest are cycles: each of their rows is read once.
  for (int64_t first = 0; first < moved; ++first) {
    if (!pending[size_t(first)]) continue;
    moves.push_back({kScratch, first});
    int64_t to = first;
    for (; sources[size_t(to)] != first; to = sources[size_t(to)]) {
      moves.push_back({to, sources[size_t(to)]});
      pending[size_t(to)] = false;
    }
    moves.push_back({to, kScratch});
    pending[size_t(to)] = false;
  }
  return moves;
}

struct GatherJob {
  const KvStorage& storage;
  const std::vector<Move>& moves;
  const std::vector<int64_t>& lengths;
  int64_t longest;
};

// One head of the keys, or of the values.
void gather_head(void* context, int64_t unit) {
  const GatherJob& job = *static_cast<const GatherJob*>(context);
  const KvStorage& storage = job.storage;
  const StridedTokens& tokens = unit < storage.heads ? storage.keys : storage.values;
  const int64_t head = unit % storage.heads, bytes = storage.token_bytes;
  std::vector<char> scratch;
  int64_t held = 0;
  for (const Move& move : job.moves) {
    if (move.to == kScratch) {
      scratch.resize(size_t(job.longest * bytes));
      held = job.lengths[size_t(move.from)];
      copy(scratch.data(), bytes, place(tokens, move.from, head, 0), tokens.position, bytes, held);
    } else if (move.from == kScratch) {
      copy(place(tokens, move.to, head, 0), tokens.position, scratch.data(), bytes, bytes, held);
    } else {
      copy(place(tokens, move.to, head, 0), tokens.position, place(tokens, move.from, head, 0),
           tokens.position, bytes, job.lengths[size_t(move.from)]);
    }
  }
}

constexpr int64_t kWorthThreads = int64_t{1} << 20;  // bytes

}  // namespace

int64_t kv_append(const KvStorage& storage, StridedTokens keys, StridedTokens values, int64_t width,
                  Integers lengths, Integers counts) {
  const auto count_of = [&](int64_t row) { return counts.data == nullptr ? width : counts[row]; };
  for (int64_t row = 0; row < storage.rows; ++row) {
    if (!fits(lengths[row], count_of(row), width, storage.capacity)) return row;
  }
  for (int64_t row = 0; row < storage.rows; ++row) {
    const auto append = [&](const StridedTokens& to, const StridedTokens& from, int64_t head) {
      copy(place(to, row, head, lengths[row]), to.position, place(from, row, head, 0),
           from.position, storage.token_bytes, count_of(row));
    };
    for (int64_t head = 0; head < storage.heads; ++head) {
      append(storage.keys, keys, head);
      append(storage.values, values, head);
    }
  }
  return -1;
}

int64_t kv_gather(const KvStorage& storage, Integers lengths, Integers sources, int64_t moved,
                  int threads) {
  std::vector<int64_t> held, from;
  for (int64_t row = 0; row < storage.rows; ++row) {
    if (!fits(lengths[row], 0, 0, storage.capacity)) return row;
    held.push_back(lengths[row]);
  }
  for (int64_t row = 0; row < moved; ++row) {
    if (sources[row] < 0 || sources[row] >= storage.rows) return row;
    from.push_back(sources[row]);
  }
  const std::vector<Move> moves = in_order(from, storage.rows);
  if (moves.empty()) return -1;
  int64_t tokens = 0;
  for (const Move& move : moves) tokens += move.from == kScratch ? 0 : held[size_t(move.from)];
  GatherJob job{storage, moves, held, *std::max_element(held.begin(), held.end())};
  const int64_t bytes = tokens * storage.heads * storage.token_bytes;
  Team team(bytes < kWorthThreads ? 0 : threads - 1, gather_head, &job);
  team.run(2 * storage.heads);
  return -1;
}

int64_t kv_compact(const KvStorage& storage, Integers positions, int64_t positions_row,
                   int64_t positions_column, int64_t width, Integers begin, Integers counts) {
  const auto position = [&](int64_t row, int64_t i) {
    return positions[row * positions_row + i * positions_column];
  };
  for (int64_t row = 0; row < storage.rows; ++row) {
    if (!fits(begin[row], counts[row], width, storage.capacity)) return row;
    for (int64_t i = 0; i < counts[row]; ++i) {
      if (position(row, i) < begin[row] + i || position(row, i) >= storage.capacity) return row;
    }
  }
  for (int64_t row = 0; row < storage.rows; ++row) {
    for (int64_t head = 0; head < storage.heads; ++head) {
      for (const StridedTokens& tokens : {storage.keys, storage.values}) {
        for (int64_t i = 0; i < counts[row]; ++i) {
          const int64_t from = position(row, i), to = begin[row] + i;
          if (from == to) continue;
          std::memcpy(place(tokens, row, head, to), place(tokens, row, head, from),
                      size_t(storage.token_bytes));
        }
      }
    }
  }
  return -1;
}

}  // namespace pipespec::cpu
