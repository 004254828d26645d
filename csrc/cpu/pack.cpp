#include "pack.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "decoder_kernels.hpp"
#include "formats/formats.hpp"
#include "number.hpp"
#include "share.hpp"

namespace pipespec::cpu {
namespace {

constexpr int64_t kPanel = kPanelOutputs;
// Weights and panels of one unit of work.
constexpr int64_t kUnitWeights = 1 << 18;
constexpr int64_t kUnitPanels = 8;
// Inputs that are transposed at a time, in the first-level cache. The rows of a matrix often lie a
// multiple of 4 KB apart, where a cache holds few lines at once.
constexpr int64_t kTile = 64;

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

// Numbers the units of several jobs one after the other.
class Units {
 public:
  void add(int64_t count) { ends_.push_back(total() + count); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  // The job that a unit belongs to, and its number there.
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
    const bool is_wide =
        s.weights.data != nullptr && !s.weights.format && s.weights.dtype == DType::kFloat32;
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

std::vector<Run> runs_of(const PanelMatrix& matrix, int bits) {
  const auto format_at = [&matrix](int64_t panel) {
    const auto begin = matrix.rows.begin() + panel * kPanel;
    const auto found = std::find_if(
        begin, begin + kPanel, [](const MatrixRow& row) { return row.weights.data != nullptr; });
    return found == begin + kPanel ? std::nullopt : found->weights.format;
  };
  const int64_t panels = int64_t(matrix.rows.size()) / kPanel;
  bool is_mixed = false;
  for (int64_t p = 1; p < panels; ++p) is_mixed |= format_at(p) != format_at(0);
  std::vector<Run> runs;
  for (int64_t p = 0; p < panels; ++p) {
    const std::optional<Format> format = format_at(p);
    if (!runs.empty() && runs.back().format == format && (format || !is_mixed)) {
      ++runs.back().panels;
      continue;
    }
    Run run;
    run.first = p, run.panels = 1, run.format = format, run.bits = bits;
    run.panel_bytes =
        format ? traits(*format).panel_bytes(matrix.inputs) : kPanel * matrix.inputs * (bits / 8);
    runs.push_back(run);
  }
  return runs;
}

namespace {

// Panel number `panel` of a run.
void pack_run_panel(const PanelMatrix& m, const Run& run, int64_t panel) {
  const MatrixRow* const rows = m.rows.data() + (run.first + panel) * kPanel;
  if (run.format) {
    const FormatTraits& f = traits(*run.format);
    for (int64_t i = 0; i < kPanel; ++i) {
      const MatrixRow& row = rows[i];
      if (row.weights.data == nullptr) continue;
      f.put(static_cast<const unsigned char*>(row.weights.data) + row.row * f.row_bytes(m.inputs),
            m.inputs, int(i), run.data + panel * run.panel_bytes);
    }
    return;
  }
  const int64_t in_group = panel % kGroupPanels, group = panel - in_group;
  const int64_t group_panels = std::min(kGroupPanels, run.panels - group);
  const int64_t at = (group * m.inputs + in_group) * kPanel;
  if (run.bits == 8) {
    pack_panel(rows, m.inputs, group_panels, reinterpret_cast<int8_t*>(run.data) + at);
  } else if (run.bits == 16) {
    pack_panel(rows, m.inputs, group_panels, reinterpret_cast<uint16_t*>(run.data) + at);
  } else {
    pack_panel(rows, m.inputs, group_panels, reinterpret_cast<float*>(run.data) + at);
  }
}

}  // namespace

void pack(const std::vector<PanelMatrix>& matrices, int threads) {
  std::vector<std::pair<const PanelMatrix*, const Run*>> all;
  Units units;
  for (const PanelMatrix& m : matrices) {
    for (const Run& run : m.runs) {
      all.emplace_back(&m, &run);
      units.add(whole(run.panels, kUnitPanels));
    }
  }
  share(threads, units.total(), [&](int64_t unit) {
    const auto [i, number] = units.at(unit);
    const auto [m, run] = all[i];
    const int64_t last = std::min(run->panels, (number + 1) * kUnitPanels);
    for (int64_t panel = number * kUnitPanels; panel < last; ++panel)
      pack_run_panel(*m, *run, panel);
  });
}

}  // namespace pipespec::cpu
