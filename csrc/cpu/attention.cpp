#include "attention.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.hpp"
#include "number.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPieceQueries = 64;                // per unit of work
constexpr int64_t kWorthThreads = int64_t{1} << 18;  // bytes of keys and values

int64_t place(const int64_t (&strides)[3], int64_t row, int64_t head, int64_t column) {
  return row * strides[0] + head * strides[1] + column * strides[2];
}

struct Job {
  const Attention& all;
  Integers lengths, counts;
  const DecoderKernels& kernels;
  int64_t piece_columns, pieces, base = 0;

  bool is_wide() const { return all.dtype == DType::kFloat32; }
  int64_t count(int64_t row) const { return counts.data == nullptr ? all.columns : counts[row]; }

  void load(const void* from, int64_t at, float* to) const {
    if (is_wide()) {
      std::memcpy(to, static_cast<const float*>(from) + at, size_t(all.head_dim) * sizeof(float));
      return;
    }
    const uint16_t* const halves = static_cast<const uint16_t*>(from) + at;
    for (int64_t d = 0; d < all.head_dim; ++d) to[d] = float_of_bfloat16(halves[d]);
  }

  void store(const float* from, int64_t at) const {
    if (is_wide()) {
      std::memcpy(static_cast<float*>(all.out) + at, from, size_t(all.head_dim) * sizeof(float));
      return;
    }
    uint16_t* const halves = static_cast<uint16_t*>(all.out) + at;
    for (int64_t d = 0; d < all.head_dim; ++d) halves[d] = bfloat16_of(from[d]);
  }

  // Some columns of the query heads that share one head of keys and values. Their queries are
  // gathered, since their heads may lie anywhere.
  void run(int64_t row, int64_t kv_head, int64_t piece) const {
    const int64_t group = all.heads / all.kv_heads, dim = all.head_dim, width = group * dim;
    const int64_t begin = piece * piece_columns;
    const int64_t end = std::min(begin + piece_columns, all.columns);
    const int64_t fed = std::clamp<int64_t>(count(row) - begin, 0, end - begin);
    const int64_t positions = lengths[row] + begin + 1;
    const AttendKernels& kernel = is_wide() ? kernels.attend32 : kernels.attend16;
    thread_local std::vector<float> scratch;
    scratch.resize(
        std::max(scratch.size(), size_t(2 * (end - begin) * width + kernel.scratch_floats(dim))));
    float* const queries = scratch.data();
    float* const out = queries + (end - begin) * width;
    for (int64_t j = 0; j < fed; ++j) {
      for (int64_t g = 0; g < group; ++g) {
        load(all.queries, place(all.query_strides, row, kv_head * group + g, begin + j),
             queries + j * width + g * dim);
      }
    }
    std::fill(out + fed * width, out + (end - begin) * width, 0.0f);
    const int64_t bytes = is_wide() ? 4 : 2;
    const auto at = [&](const void* tokens, const int64_t (&strides)[3]) {
      return static_cast<const char*>(tokens) + place(strides, row, kv_head, 0) * bytes;
    };
    if (fed > 0) {
      kernel.attend({queries, width, at(all.keys, all.key_strides),
                     at(all.values, all.value_strides), all.key_strides[2], all.value_strides[2],
                     positions, all.window, fed, group, dim, all.scale, all.softcap, out, width,
                     out + (end - begin) * width, nullptr, 0});
    }
    for (int64_t j = 0; j < end - begin; ++j) {
      for (int64_t g = 0; g < group; ++g) {
        store(out + j * width + g * dim,
              place(all.out_strides, row, kv_head * group + g, begin + j));
      }
    }
  }

  static void work(void* context, int64_t unit) {
    const Job& job = *static_cast<const Job*>(context);
    const int64_t at = job.base + unit, head = at / job.pieces;
    job.run(head / job.all.kv_heads, head % job.all.kv_heads, at % job.pieces);
  }
};

}  // namespace

int64_t attend(const Attention& attention, Integers lengths, Integers counts, int threads) {
  const int64_t columns = attention.columns;
  const int64_t piece = std::max<int64_t>(kPieceQueries * attention.kv_heads / attention.heads, 1);
  Job job{attention, lengths, counts, kernels().decoder, piece, (columns + piece - 1) / piece};
  int64_t tokens = 0;
  for (int64_t row = 0; row < attention.rows; ++row) {
    const int64_t length = lengths[row], count = job.count(row);
    if (count < 0 || count > attention.columns || length < 0 || length > attention.capacity - count)
      return row;
    tokens += length + count;
  }
  const int64_t bytes = 2 * tokens * attention.kv_heads * attention.head_dim *
                        (attention.dtype == DType::kFloat32 ? 4 : 2);
  Team team(bytes < kWorthThreads ? 0 : threads - 1, Job::work, &job);
  const int64_t units = attention.rows * attention.kv_heads * job.pieces;
  for (; job.base < units; job.base += Team::kMaxUnits)
    team.run(std::min(units - job.base, Team::kMaxUnits));
  return -1;
}

}  // namespace pipespec::cpu
