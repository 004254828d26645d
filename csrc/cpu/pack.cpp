#include "pack.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "decoder_kernels.hpp"
#include "number.hpp"
#include "pool.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Weights and panels of one unit of work.
constexpr int64_t kUnitWeights = 1 << 18;
constexpr int64_t kUnitPanels = 8;
// Inputs that are transposed at a time, in the first-level cache. The rows of a matrix often lie a
// multiple of 4 KB apart, where a cache holds few lines at once.
constexpr int64_t kTile = 64;

// Runs work(0 .. units - 1) on `threads` threads, the calling one included.
template <typename Work>
void share(int threads, int64_t units, const Work& work) {
  struct Job {
    const Work& work;
    int64_t base;
  } job{work, 0};
  Team team(
      threads - 1,
      [](void* context, int64_t unit) {
        const Job& of = *static_cast<const Job*>(context);
        of.work(of.base + unit);
      },
      &job);
  for (; job.base < units; job.base += Team::kMaxUnits)
    team.run(std::min(units - job.base, Team::kMaxUnits));
}

void convert(float from, float& to) { to = from; }
void convert(float from, uint16_t& to) { to = uint16_t(bits_of(from) >> 16); }
void convert(uint16_t from, float& to) { to = float_of_bfloat16(from); }
void convert(uint16_t from, uint16_t& to) { to = from; }

template <typename From, typename To>
void convert_row(const MatrixRow& row, int64_t inputs, int64_t begin, int64_t count, To* to) {
  const From* const from = static_cast<const From*>(row.weights.data) + row.row * inputs + begin;
  for (int64_t k = 0; k < count; ++k) convert(from[k], to[k]);
}

// Where the weight of an output lies among the 16 of an input.
template <typename To>
constexpr int64_t place(int64_t output) {
  return sizeof(To) == 2 ? output % 8 * 2 + output / 8 : output;
}

void copy_row(const MatrixRow& row, int64_t inputs, int64_t begin, int64_t count, int8_t* to) {
  std::memcpy(to, static_cast<const int8_t*>(row.weights.data) + row.row * inputs + begin,
              size_t(count));
}
template <typename To>
void copy_row(const MatrixRow& row, int64_t inputs, int64_t begin, int64_t count, To* to) {
  (row.weights.dtype == DType::kFloat32 ? convert_row<float, To>
                                        : convert_row<uint16_t, To>)(row, inputs, begin, count, to);
}

// One of `group_panels` panels of a group, whose first weights lie at `out`.
template <typename To>
void pack_panel(const MatrixRow* rows, int64_t inputs, int64_t group_panels, To* out) {
  alignas(64) To tile[kPanel][kTile] = {};
  for (int64_t begin = 0; begin < inputs; begin += kTile) {
    const int64_t count = std::min(kTile, inputs - begin);
    for (int64_t i = 0; i < kPanel; ++i) {
      if (rows[i].weights.data != nullptr) copy_row(rows[i], inputs, begin, count, tile[i]);
    }
    for (int64_t k = 0; k < count; ++k, out += group_panels * kPanel)
      for (int64_t i = 0; i < kPanel; ++i) out[place<To>(i)] = tile[i][k];
  }
}

// Units of several things, each of which has some.
class Units {
 public:
  void add(int64_t count) { ends_.push_back(total() + count); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // The thing that a unit belongs to, and its number there.
  std::pair<size_t, int64_t> at(int64_t unit) const {
    const auto found = std::upper_bound(ends_.begin(), ends_.end(), unit);
    const int64_t begin = found == ends_.begin() ? 0 : *(found - 1);
    return {size_t(found - ends_.begin()), unit - begin};
  }

 private:
  std::vector<int64_t> ends_;
};

int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }

}  // namespace

bool are_bfloat16(const std::vector<WeightSpan>& spans, int threads) {
  Units units;
  for (const WeightSpan& s : spans) {
    const bool is_wide = s.weights.data != nullptr && s.weights.dtype == DType::kFloat32;
    units.add(is_wide ? whole(s.count, kUnitWeights) : 0);
  }
  std::atomic<bool> found{false};  // a weight with low bits
  share(threads, units.total(), [&](int64_t unit) {
    if (found.load(std::memory_order_relaxed)) return;
    const auto [i, number] = units.at(unit);
    const int64_t begin = number * kUnitWeights;
    const int64_t count = std::min(kUnitWeights, spans[i].count - begin);
    const float* const x = static_cast<const float*>(spans[i].weights.data) + begin;
    uint32_t low = 0;
    for (int64_t k = 0; k < count; ++k) low |= bits_of(x[k]);
    if ((low & 0xFFFF) != 0) found.store(true, std::memory_order_relaxed);
  });
  return !found.load(std::memory_order_relaxed);
}

void pack(const std::vector<PanelMatrix>& matrices, int bits, int threads) {
  Units units;
  for (const PanelMatrix& m : matrices)
    units.add(whole(int64_t(m.rows.size()), kUnitPanels * kPanel));
  share(threads, units.total(), [&](int64_t unit) {
    const auto [i, number] = units.at(unit);
    const PanelMatrix& m = matrices[i];
    const int64_t panels = int64_t(m.rows.size()) / kPanel;
    const int64_t last = std::min(panels, (number + 1) * kUnitPanels);
    for (int64_t panel = number * kUnitPanels; panel < last; ++panel) {
      const int64_t in_group = panel % kGroupPanels, group = panel - in_group;
      const int64_t group_panels = std::min(kGroupPanels, panels - group);
      const int64_t at = (group * m.inputs + in_group) * kPanel;
      const MatrixRow* const rows = m.rows.data() + panel * kPanel;
      if (bits == 8) {
        pack_panel(rows, m.inputs, group_panels, reinterpret_cast<int8_t*>(m.to) + at);
      } else if (bits == 16) {
        pack_panel(rows, m.inputs, group_panels, reinterpret_cast<uint16_t*>(m.to) + at);
      } else {
        pack_panel(rows, m.inputs, group_panels, reinterpret_cast<float*>(m.to) + at);
      }
    }
  });
}

}  // namespace pipespec::cpu
