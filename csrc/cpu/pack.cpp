#include "pack.hpp"

#include <algorithm>
#include <atomic>

#include "decoder_kernels.hpp"
#include "formats/formats.hpp"
#include "number.hpp"
#include "share.hpp"

namespace pipespec::cpu {
namespace {

// Weights and panels of one unit of work.
constexpr int64_t kUnitWeights = 1 << 18;
constexpr int64_t kUnitPanels = 8;

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

// Calls work(span, begin, end) for parts of all spans.
template <typename Work>
void share_spans(const std::vector<WeightSpan>& spans, int threads, const Work& work) {
  Units units;
  for (const WeightSpan& span : spans) units.add(whole(span.count, kUnitWeights));
  share(threads, units.total(), [&](int64_t unit) {
    const auto [i, number] = units.at(unit);
    const int64_t begin = number * kUnitWeights;
    work(i, begin, std::min(begin + kUnitWeights, spans[i].count));
  });
}

}  // namespace

std::vector<bool> are_bfloat16(const std::vector<WeightSpan>& spans, int threads) {
  std::vector<std::atomic<bool>> has_more(spans.size());  // a weight with low bits
  share_spans(spans, threads, [&](size_t i, int64_t begin, int64_t end) {
    if (has_more[i].load(std::memory_order_relaxed)) return;
    const float* const x = static_cast<const float*>(spans[i].weights.data);
    uint32_t low = 0;
    for (int64_t k = begin; k < end; ++k) low |= bits_of(x[k]);
    if ((low & 0xFFFF) != 0) has_more[i].store(true, std::memory_order_relaxed);
  });
  std::vector<bool> found;
  for (const std::atomic<bool>& more : has_more) found.push_back(!more.load());
  return found;
}

void narrow(const std::vector<WeightSpan>& spans, uint16_t* to, int threads) {
  std::vector<int64_t> begins{0};
  for (const WeightSpan& span : spans) begins.push_back(begins.back() + span.count);
  share_spans(spans, threads, [&](size_t i, int64_t begin, int64_t end) {
    const float* const x = static_cast<const float*>(spans[i].weights.data);
    for (int64_t k = begin; k < end; ++k) to[begins[i] + k] = uint16_t(bits_of(x[k]) >> 16);
  });
}

std::vector<Run> runs_of(const PanelMatrix& matrix) {
  std::vector<Run> runs;
  for (size_t p = 0; p < matrix.panels.size(); ++p) {
    const auto& [weights, row, count] = matrix.panels[p];
    const int bits = weights.format                      ? 0
                     : weights.scale != nullptr          ? 8
                     : weights.dtype == DType::kBFloat16 ? 16
                                                         : 32;
    if (runs.empty() || runs.back().format != weights.format || runs.back().bits != bits) {
      Run run;
      run.first = int64_t(p), run.format = weights.format, run.bits = bits;
      if (run.format) run.panel_bytes = traits(*run.format).panel_bytes(matrix.inputs);
      runs.push_back(run);
    }
    Run& run = runs.back();
    ++run.panels;
    if (run.format) continue;
    const auto* const data = static_cast<const unsigned char*>(weights.data);
    run.rows.push_back({data + row * matrix.inputs * (bits / 8), count});
  }
  return runs;
}

void pack(const std::vector<PanelMatrix>& matrices, int threads) {
  std::vector<std::pair<const PanelMatrix*, const Run*>> all;
  Units units;
  for (const PanelMatrix& m : matrices) {
    for (const Run& run : m.runs) {
      if (!run.format) continue;
      all.emplace_back(&m, &run);
      units.add(whole(run.panels, kUnitPanels));
    }
  }
  share(threads, units.total(), [&](int64_t unit) {
    const auto [i, number] = units.at(unit);
    const auto [m, run] = all[i];
    const FormatTraits& f = traits(*run->format);
    const int64_t row_bytes = f.row_bytes(m->inputs);
    const int64_t last = std::min(run->panels, (number + 1) * kUnitPanels);
    for (int64_t panel = number * kUnitPanels; panel < last; ++panel) {
      const auto& [weights, row, count] = m->panels[size_t(run->first + panel)];
      const auto* const rows = static_cast<const unsigned char*>(weights.data) + row * row_bytes;
      for (int64_t lane = 0; lane < count; ++lane)
        f.put(rows + lane * row_bytes, m->inputs, int(lane), run->data + panel * run->panel_bytes);
    }
  });
}

}  // namespace pipespec::cpu
